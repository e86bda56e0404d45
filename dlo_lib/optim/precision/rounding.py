"""Rounding to a number format: to the nearest number, or at random so that the mean is right.

:func:`round_to` computes in fp64, which holds every number of the other formats and their neighbours exactly.
It is readable and slow. :func:`stochastic_round` to bf16 works on the bits of fp32, in place of a cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.formats import FloatFormat


def round_to(
    x: Tensor,
    to: FloatFormat,
    stochastic: bool = False,
    saturate: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return ``x`` rounded to numbers of the format ``to``, in the dtype of ``x``.

    Args:
        x: any shape, fp32 or fp64.
        stochastic: round up with the probability ``(x - below) / (above - below)``, so that the expected
        value
            is ``x``. Otherwise the nearest number, and of two equally near ones the even one, as a cast does.
        saturate: what is larger than ``to.max`` becomes ``to.max``; otherwise infinity, or NaN in a format
            without infinity. Infinity and NaN in ``x`` stay.
        generator: the source of the random numbers.

    Raises:
        UserError: ``x`` is neither fp32 nor fp64.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise UserError(f"a tensor of {x.dtype} is rounded already: give fp32 or fp64")
    wide = x.double()
    _, exponent = torch.frexp(wide)  # wide = m * 2^exponent with 0.5 <= |m| < 1
    exponent = (exponent - 1).clamp(min=to.smallest_exponent)
    step = torch.ldexp(torch.ones_like(wide), exponent - to.mantissa_bits)  # the spacing of the format here
    units = wide / step
    if stochastic:
        noise = torch.rand(units.shape, dtype=units.dtype, device=units.device, generator=generator)
        rounded = (units + noise).floor() * step
    else:
        rounded = units.round() * step
    beyond = torch.where(
        torch.isfinite(wide), rounded.abs() > to.max, torch.zeros_like(wide, dtype=torch.bool)
    )
    if saturate:
        limit = torch.full_like(wide, to.max)
    else:
        limit = torch.full_like(wide, torch.inf if to.infinite else torch.nan)
    rounded = torch.where(beyond, torch.copysign(limit, wide), rounded)
    return torch.where(torch.isfinite(wide), rounded, wide).to(x.dtype)


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return ``x`` (fp32, any shape) rounded to bf16 at random; the expected value is ``x``.

    bf16 is the upper half of the bits of fp32. A uniform random number below 2^16 is added to the bits, and
    the lower half is cut off: the carry happens with the right probability. Infinity and NaN stay.

    Raises:
        UserError: ``x`` is not fp32.
    """
    if x.dtype != torch.float32:
        raise UserError(f"stochastic rounding to bf16 takes fp32, not {x.dtype}: convert it first")
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


@dataclass(frozen=True)
class RoundingLoss:
    """What a format loses of the values of a tensor, as shares of the values that are finite and not 0.

    Attributes:
        underflow: become 0.
        subnormal: stay, with a resolution that is reduced because they are near 0.
        overflow: become infinite, NaN or the largest number.
        relative_error: the largest relative error of the values that are normal in the format.
    """

    underflow: float
    subnormal: float
    overflow: float
    relative_error: float


def rounding_loss(x: Tensor, to: FloatFormat, scale: float = 1.0) -> RoundingLoss:
    """Return what is lost if ``x * scale`` is rounded to the format ``to``.

    ``x``: any shape, fp32 or fp64.
    """
    values = x.detach().flatten() * scale
    values = values[torch.isfinite(values) & (values != 0)]
    if not len(values):
        return RoundingLoss(0.0, 0.0, 0.0, 0.0)
    rounded = round_to(values, to)
    over = ~torch.isfinite(rounded)
    zero = rounded == 0
    small = (values.abs() < to.smallest_normal) & ~zero
    normal = ~over & ~zero & ~small
    error = ((rounded - values) / values).abs()[normal]
    underflow, subnormal, overflow = (share.double().mean().item() for share in (zero, small, over))
    return RoundingLoss(underflow, subnormal, overflow, error.max().item() if len(error) else 0.0)
