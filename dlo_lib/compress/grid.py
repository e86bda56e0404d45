"""Integer grids: the map between real numbers and integers of b bits.

    q = clamp(round(x / S) + Z, quant_min, quant_max)        x' = (q - Z) S

A symmetric (absmax) grid has Z = 0, S = max|x| / (2^(b-1) - 1) and the integers -(2^(b-1) - 1) to
2^(b-1) - 1. An asymmetric (zero-point) grid covers min(x, 0) to max(x, 0) with all 2^b integers, and Z is the
integer of the real number 0, which both grids represent exactly. Within the range, the error of a number is
at most S / 2, so each additional bit halves it. A grid holds for a tensor, a channel, or a group of
consecutive inputs: smaller parts have smaller ranges, and one scale more each.

Cost: b / 8 bytes a number, and 4 bytes of scale for each part.

Papers: Integer quantization for deep learning inference (arXiv:2004.09602), Quantization and training of
neural networks for efficient integer-arithmetic-only inference (arXiv:1712.05877).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count


@dataclass(frozen=True)
class IntegerGrid:
    """An integer grid for a tensor.

    ``scale`` and ``zero_point`` (int32) have one shape. Without ``group_size`` they broadcast with the
    tensor. With it, the last dimension n of the tensor is n / group_size in them.
    """

    scale: Tensor
    zero_point: Tensor
    bits: int = 8
    symmetric: bool = True
    group_size: int | None = None


def integer_range(bits: int, symmetric: bool = True) -> tuple[int, int]:
    """Return the smallest and the largest integer of a grid of ``bits`` bits, 2 to 8.

    Raises:
        UserError: ``bits`` is not a whole number from 2 to 8.
    """
    require_count("bits", bits, least=2)
    if bits > 8:
        raise UserError(f"bits is {bits}: use 2 to 8, because the integers are stored as int8")
    top = 2 ** (bits - 1) - 1
    return (-top if symmetric else -top - 1), top


def grid_from_range(
    low: Tensor, high: Tensor, bits: int = 8, symmetric: bool = True, group_size: int | None = None
) -> IntegerGrid:
    """Return the grid that covers the range from ``low`` to ``high``, extended to contain 0.

    Args:
        low, high: of one shape, floating-point; the scale has their shape, and fp32 or wider.
        bits: 2 to 8.
        symmetric: cover -max(|low|, |high|) to max(|low|, |high|) with zero-point 0.
        group_size: as in ``IntegerGrid``.

    Raises:
        UserError: ``bits`` is out of range, or a bound is NaN or infinite.
    """
    least, most = integer_range(bits, symmetric)
    require_finite("the range", low)
    require_finite("the range", high)
    low, high = widened(low).clamp(max=0), widened(high).clamp(min=0)
    # Two quotients, because the difference of two large bounds can exceed the largest number of the dtype.
    scale = torch.maximum(-low, high) / most if symmetric else high / (most - least) - low / (most - least)
    tiny = torch.finfo(scale.dtype).tiny
    scale = torch.where((low == 0) & (high == 0), torch.ones_like(scale), scale.clamp(min=tiny))
    zero = torch.zeros_like(scale) if symmetric else (least - low / scale).round().clamp(least, most)
    return IntegerGrid(scale, zero.to(torch.int32), bits, symmetric, group_size)


def choose_grid(
    x: Tensor,
    bits: int = 8,
    symmetric: bool = True,
    dim: int | None = None,
    group_size: int | None = None,
) -> IntegerGrid:
    """Return the grid that covers the smallest and the largest number of each part of ``x``.

    Args:
        x: floating-point, not empty.
        bits: 2 to 8.
        symmetric: choose an absmax grid; otherwise a zero-point grid.
        dim: the dimension of the channels, which have a scale each: the scale has size 1 in every other
            dimension. None: one scale, ().
        group_size: the number of consecutive numbers of the last dimension n that share a scale: the scale is
            (..., n / group_size). It excludes ``dim``.

    Raises:
        UserError: ``x`` is empty, or contains NaN or infinity; both ``dim`` and ``group_size`` are given;
            n is no multiple of ``group_size``.
    """
    require_finite("x", x)
    if not x.numel():
        raise UserError(f"x has shape {tuple(x.shape)}: a grid needs at least one number")
    if group_size is not None:
        if dim is not None:
            raise UserError(
                "dim and group_size are both given: use one, groups are parts of the last dimension"
            )
        parts = grouped(x, group_size)
        return grid_from_range(parts.amin(-1), parts.amax(-1), bits, symmetric, group_size)
    if dim is None:
        return grid_from_range(x.amin(), x.amax(), bits, symmetric)
    if not -x.dim() <= dim < x.dim():
        raise UserError(f"dim is {dim}: x has {x.dim()} dimensions, use one of them")
    others = [other for other in range(x.dim()) if other != dim % x.dim()]
    if not others:
        return grid_from_range(x, x, bits, symmetric)
    return grid_from_range(x.amin(others, keepdim=True), x.amax(others, keepdim=True), bits, symmetric)


def quantize(x: Tensor, grid: IntegerGrid) -> Tensor:
    """Return the integers of ``x``, int8 of its shape; halves are rounded to even.

    Raises:
        UserError: ``x`` contains NaN or infinity, or its shape does not fit the grid.
    """
    require_finite("x", x)
    least, most = integer_range(grid.bits, grid.symmetric)
    parts, scale, zero = _fitted(widened(x), grid)
    return ((parts / scale).round() + zero).clamp(least, most).to(torch.int8).view(x.shape)


def dequantize(q: Tensor, grid: IntegerGrid) -> Tensor:
    """Return the numbers of the integers ``q``, in the dtype of the scale.

    Raises:
        UserError: the shape of ``q`` does not fit the grid.
    """
    parts, scale, zero = _fitted(q, grid)
    return ((parts.to(torch.int32) - zero) * scale).view(q.shape)


def fake_quantize(x: Tensor, grid: IntegerGrid) -> Tensor:
    """Return ``x`` rounded to the grid, in the dtype of ``x``.

    Raises:
        UserError: as ``quantize``.
    """
    return dequantize(quantize(x, grid), grid).to(x.dtype)


def grouped(x: Tensor, group_size: int) -> Tensor:
    """Return ``x`` (..., n) as (..., n / group_size, group_size).

    Raises:
        UserError: ``group_size`` is not a whole number, at least 1, that divides n.
    """
    require_count("group_size", group_size)
    if not x.dim() or x.shape[-1] % group_size:
        size = x.shape[-1] if x.dim() else 1
        raise UserError(f"group_size is {group_size}: use a divisor of {size}, the last dimension")
    return x.unflatten(-1, (-1, group_size))


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in fp32, or unchanged in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def require_finite(name: str, x: Tensor) -> None:
    """Check that ``x`` is floating-point, and that it contains neither NaN nor infinity.

    Raises:
        UserError: it is not.
    """
    if not x.is_floating_point():
        raise UserError(f"{name} is {x.dtype}: use a floating-point tensor")
    if not bool(x.isfinite().all()):
        raise UserError(f"{name} contains NaN or infinity: no grid covers it, look where it comes from")


def _fitted(x: Tensor, grid: IntegerGrid) -> tuple[Tensor, Tensor, Tensor]:
    if grid.group_size is not None:
        parts = grouped(x, grid.group_size)
        scale, zero = grid.scale.unsqueeze(-1), grid.zero_point.unsqueeze(-1)
    else:
        parts, scale, zero = x, grid.scale, grid.zero_point
    try:
        fits = torch.broadcast_shapes(parts.shape, scale.shape) == parts.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise UserError(
            f"the tensor is {tuple(x.shape)} and the scale {tuple(grid.scale.shape)}: "
            "choose the grid for this shape"
        )
    return parts, scale, zero
