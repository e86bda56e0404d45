"""AWQ: scale the weights of the channels with large activations, before weights are rounded.

About 1 % of the input channels, those with the largest activations, cause most of the error of rounded
weights. A weight that is multiplied by s > 1 before rounding, with its activation divided by s, has an error
smaller by s as long as the range of its group stays the same:

    Q(W s) (x / s)        s_j = mean|x_j|^a        a from 0 to 1 with the smallest |Q(W s) (x / s) - W x|^2

Cost: one product for each exponent tried, when the model is quantized; none when it runs, because the
division is part of the module before (``smoothquant.fold_factors``).

Paper: AWQ (arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.compress.grid import choose_grid, fake_quantize, require_finite, widened


@torch.no_grad()
def search_awq_factors(
    x: Tensor,
    weights: Sequence[Tensor],
    bits: int = 4,
    group_size: int | None = None,
    symmetric: bool = True,
    steps: int = 20,
) -> tuple[Tensor, float]:
    """Return the factors (in,), and the exponent a that they come from.

    Args:
        x: activations (..., in), of a few hundred tokens.
        weights: the matrices (out, in) that read them; they share the factors, and their errors are added.
        bits, group_size, symmetric: the grid of the weights; without a group size, one for each row.
        steps: the exponents tried are 0, 1 / steps, ... 1. Exponent 0 is plain rounding, so that the error is
            never above that of plain rounding.

    Raises:
        UserError: ``x`` is empty or contains NaN or infinity, or a shape does not fit.
    """
    require_count("steps", steps)
    require_finite("x", x)
    if not x.numel() or not weights or any(weight.shape[-1] != x.shape[-1] for weight in weights):
        raise UserError(f"x is {tuple(x.shape)}: give at least one token, and weights (out, {x.shape[-1]})")
    rows = widened(x.reshape(-1, x.shape[-1]))
    matrices = [widened(weight) for weight in weights]
    # |(W' - W) x|^2 summed over tokens is the trace of (W' - W) X^T X (W' - W)^T.
    gram = rows.t() @ rows
    mean = rows.abs().mean(0).clamp(min=1e-4)
    size = x.shape[-1] if group_size is None else group_size
    best, best_error, exponent = torch.ones_like(mean), float("inf"), 0.0
    for step in range(steps + 1):
        factors = mean ** (step / steps)
        # The factors are centred, so that neither weights nor activations leave the range of the dtype.
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = 0.0
        for weight in matrices:
            scaled = weight * factors
            rounded = fake_quantize(scaled, choose_grid(scaled, bits, symmetric, group_size=size)) / factors
            error += float(((rounded - weight) @ gram * (rounded - weight)).sum())
        if error < best_error:
            best, best_error, exponent = factors, error, step / steps
    return best, exponent
