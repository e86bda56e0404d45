"""GPTQ: round a matrix column by column, and correct the columns not yet rounded for the error made.

It minimises |W X - Q X|^2 for each row w of W. With H = X X^T + damping, rounding column j changes the best
remaining columns by

    w_k  <-  w_k - (w_j - q_j) / [H^-1]_jj  [H^-1]_jk        k > j        (Optimal brain surgeon)

where H is the Hessian of the columns not yet rounded. All rows share H, and the inverses of all remaining
parts are the rows of one Cholesky factor: H^-1 = U^T U with U upper triangular gives
[H^-1]_jk / [H^-1]_jj = U_jk / U_jj  for the part from j on.

Cost: n^3 for the factor and out n^2 for the updates, n inputs; none when the model runs.

Papers: GPTQ (arXiv:2210.17323), Optimal brain compression (arXiv:2208.11580).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.compress.grid import (
    IntegerGrid,
    choose_grid,
    dequantize,
    grouped,
    quantize,
    require_finite,
    widened,
)


def hessian(x: Tensor) -> Tensor:
    """Return X X^T of activations ``x`` (..., n), summed over tokens: (n, n), fp32 or wider.

    Those of several batches are added.
    """
    rows = widened(x.reshape(-1, x.shape[-1]))
    return rows.t() @ rows


@torch.no_grad()
def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    bits: int = 4,
    group_size: int | None = None,
    symmetric: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
) -> tuple[Tensor, IntegerGrid]:
    """Return the integers of ``weight`` (out, n), int8 (out, n), and their grid with groups.

    Args:
        weight: floating-point.
        hessian: X X^T of the inputs, (n, n).
        bits, group_size, symmetric: the grid; without a group size, one for each row. The scale of a group is
            chosen when its first column is reached, from its corrected weights.
        damping: this part of the mean diagonal is added to the diagonal.
        act_order: round the columns with the largest diagonal first. The scales of all groups are then chosen
            from the weights before any correction.

    Raises:
        UserError: a shape does not fit, a tensor contains NaN or infinity, or H is not positive definite.
    """
    require_finite("weight", weight)
    require_finite("hessian", hessian)
    n = weight.shape[-1]
    if weight.dim() != 2 or hessian.shape != (n, n):
        raise UserError(f"weight is {tuple(weight.shape)}: give (out, n), and a hessian (n, n)")
    size = n if group_size is None else group_size
    grouped(weight, size)
    rest, h = widened(weight).clone(), widened(hessian).clone()
    unused = h.diagonal() == 0
    h.diagonal()[unused] = 1
    rest[:, unused] = 0  # no input reads these columns, so that 0 costs nothing
    grid = choose_grid(rest, bits, symmetric, group_size=size)
    columns = torch.arange(n, device=h.device)
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else columns
    factor = inverse_factor(h[order][:, order], damping).to(rest.dtype)
    rest = rest[:, order]
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for step, column in enumerate(order.tolist()):
        group = column // size
        if column % size == 0 and not act_order:
            part = choose_grid(rest[:, step : step + size], bits, symmetric, dim=0)
            grid.scale[:, group], grid.zero_point[:, group] = part.scale[:, 0], part.zero_point[:, 0]
        here = IntegerGrid(grid.scale[:, group], grid.zero_point[:, group], bits, symmetric)
        q[:, column] = quantize(rest[:, step], here)
        error = (rest[:, step] - dequantize(q[:, column], here)) / factor[step, step]
        rest[:, step + 1 :] -= torch.outer(error, factor[step, step + 1 :])
    return q, grid


def inverse_factor(hessian: Tensor, damping: float = 0.01) -> Tensor:
    """Return the upper triangular U with U^T U = (H + damping mean(diag H) I)^-1, (n, n) fp64.

    Raises:
        UserError: the matrix is not positive definite.
    """
    h = hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype, device=h.device)
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        raise UserError(
            f"the hessian is not positive definite with damping {damping}: raise it, or use more tokens"
        )
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed):
        raise UserError(
            f"the hessian cannot be inverted with damping {damping}: raise it, or use more tokens"
        )
    return upper
