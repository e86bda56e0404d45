"""SmoothQuant: outliers of activations are moved into the weights, which are easier to quantize.

    x W^T = (x / s) (W s)^T        s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)    for input channel j

The division by s is part of the module before: the weight of a norm, or the rows of a linear layer, is
divided by s once. The function stays equal up to rounding, and with alpha = 1/2 both factors of channel j
have the range sqrt(max|x_j| max|W_j|).

Cost: none when the model runs.

Paper: SmoothQuant (arXiv:2211.10438).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.compress.calibration import channel_absmax


def smoothing_factors(
    activation_max: Tensor, weights: Sequence[Tensor], alpha: float = 0.5, least: float = 1e-5
) -> Tensor:
    """Return the factor s of each input channel, (in,).

    Args:
        activation_max: the largest absolute activation of each channel, (in,).
        weights: the matrices (out, in) that read these activations; they share the factors.
        alpha: the part of the range that moves into the weights, 0 to 1.
        least: maxima below this are raised to it, so that unused channels have a finite factor.

    Raises:
        UserError: ``alpha`` is out of range, a shape does not fit, or a tensor contains NaN or infinity.
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is {alpha}: use a number from 0 to 1")
    if not weights or any(weight.shape[-1] != activation_max.numel() for weight in weights):
        raise UserError(
            f"activation_max has {activation_max.numel()} channels: give weights (out, in) with as many"
        )
    weight_max = torch.stack([channel_absmax(weight.detach()) for weight in weights]).amax(0)
    activation_max = channel_absmax(activation_max.detach())
    return activation_max.clamp(min=least) ** alpha / weight_max.clamp(min=least) ** (1 - alpha)


@torch.no_grad()
def fold_factors(before: nn.Module, linears: Sequence[nn.Linear], factors: Tensor) -> None:
    """Divide the output of ``before`` by ``factors`` (in,) and multiply the columns of ``linears`` by them,
    in place.

    ``before`` is a norm with a weight (in,), or a linear layer with ``in`` outputs whose result reaches
    ``linears`` through operations that are linear in each channel.

    Raises:
        UserError: a factor is not positive and finite.
    """
    if not bool(((factors > 0) & factors.isfinite()).all()):
        raise UserError("a factor is not positive and finite: raise `least`, or check the activations")
    weight = before.get_parameter("weight")
    weight.div_((factors if weight.dim() == 1 else factors[:, None]).to(weight.dtype))
    bias = getattr(before, "bias", None)
    if bias is not None:
        bias.div_(factors.to(bias.dtype))
    for linear in linears:
        linear.weight.mul_(factors.to(linear.weight.dtype))
