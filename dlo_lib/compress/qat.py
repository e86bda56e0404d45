"""Quantization-aware training: the forward rounds, and the backward ignores the rounding.

A rounding has the gradient 0 almost everywhere. The straight-through estimator passes the gradient of the
rounded value to the value itself, inside the range of the grid:

    forward     x' = fake_quantize(x)
    backward    dx = dx' where quant_min <= round(x / S) + Z <= quant_max, otherwise 0

The optimizer updates the floating-point weight, so that small steps add up until a weight reaches the next
integer.

BitNet b1.58 trains weights of -1, 0 and 1 in this way:  W' = G round_clip(W / G, -1, 1)  with  G = mean|W|,
and activations of 8 bits for each token.

Cost: a floating-point copy of the weight during training; afterwards ``convert`` stores b bits, or 1.6 bits.

Papers: Estimating or propagating gradients through stochastic neurons (arXiv:1308.3432), BitNet b1.58
(arXiv:2402.17764).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from dlo_lib.base.errors import UserError
from dlo_lib.compress.grid import IntegerGrid, choose_grid, grouped, integer_range, widened
from dlo_lib.compress.packing import pack_ternary, unpack_ternary
from dlo_lib.compress.weight_only import QuantizedLinear


def fake_quantize_ste(
    x: Tensor, scale: Tensor, zero_point: Tensor | int, quant_min: int, quant_max: int
) -> Tensor:
    """Return ``x`` rounded to a grid, with the clipped straight-through gradient.

    Args:
        x: floating-point.
        scale, zero_point: broadcast with ``x``; they have no gradient.
        quant_min, quant_max: the range of the integers.
    """
    out: Tensor = _FakeQuantize.apply(x, scale, zero_point, quant_min, quant_max)
    return out


class _FakeQuantize(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | int, quant_min: int, quant_max: int
    ) -> Tensor:
        q = (x / scale).round() + zero_point
        ctx.save_for_backward((q >= quant_min) & (q <= quant_max))
        return ((q.clamp(quant_min, quant_max) - zero_point) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None, None


class FakeQuantizedLinear(nn.Linear):
    """A linear layer that rounds its weight, and optionally its input for each token, in each forward.

    Args:
        in_features, out_features, bias: as in ``nn.Linear``.
        weight_bits: 2 to 8; symmetric, with a scale for each group.
        group_size: the inputs that share a scale; None: all of a row.
        activation_bits: 2 to 8, symmetric for each token; None: the input is not rounded.

    Raises:
        UserError: a number of bits is out of range, or ``group_size`` does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        weight_bits: int = 4,
        group_size: int | None = None,
        activation_bits: int | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.group_size = in_features if group_size is None else group_size
        self.weight_bits, self.activation_bits = weight_bits, activation_bits
        integer_range(weight_bits)
        integer_range(activation_bits or 8)
        grouped(self.weight, self.group_size)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> FakeQuantizedLinear:
        """Return a layer with the parameters of ``linear``; ``options`` are those of the class."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        new.weight, new.bias = linear.weight, linear.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        parts = grouped(self.weight, self.group_size)
        grid = choose_grid(self.weight.detach(), self.weight_bits, group_size=self.group_size)
        least, most = integer_range(self.weight_bits)
        weight = fake_quantize_ste(parts, grid.scale.unsqueeze(-1), 0, least, most).flatten(-2)
        if self.activation_bits is not None:
            x = _round_tokens(x, self.activation_bits)
        return F.linear(x, weight, self.bias)

    def convert(self) -> QuantizedLinear:
        """Return the layer with stored integers of 4 or 8 bits; it does not round its input.

        Raises:
            UserError: ``weight_bits`` is another number.
        """
        return QuantizedLinear.from_linear(self, self.weight_bits, self.group_size)


class BitLinear(nn.Linear):
    """The linear layer of BitNet b1.58: ternary weights with one scale, and an input of 8 bits for each
    token.

    Arguments as in ``nn.Linear``. The paper has an RMSNorm before the rounding of the input, which in a Llama
    is the norm before the layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        scale = absmean(self.weight.detach())
        weight = _Ternary.apply(self.weight, scale)  # type: ignore[no-untyped-call]
        return F.linear(_round_tokens(x, 8), weight, self.bias)

    def convert(self, values_per_byte: int = 5) -> TernaryLinear:
        """Return the layer with packed weights, ``values_per_byte`` (4 or 5) in a byte."""
        return TernaryLinear(self, values_per_byte)


class TernaryLinear(nn.Module):
    """The packed form of a ``BitLinear``. The buffers: ``packed`` uint8 (out, ceil(in / values_per_byte)),
    ``scale`` (), and ``bias`` (out,) if any.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, values_per_byte: int = 5) -> None:
        super().__init__()
        self.in_features, self.values_per_byte = linear.in_features, values_per_byte
        scale = absmean(linear.weight.detach())
        q = _ternary(linear.weight.detach(), scale).to(torch.int8)
        self.register_buffer("packed", pack_ternary(q, values_per_byte))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        q = unpack_ternary(self.packed, self.in_features, self.values_per_byte)
        return F.linear(_round_tokens(x, 8), (q * self.scale).to(x.dtype), self.bias)


def absmean(weight: Tensor) -> Tensor:
    """Return mean|weight|, (), fp32 or wider; 1 if all weights are 0.

    Raises:
        UserError: ``weight`` is empty.
    """
    if not weight.numel():
        raise UserError(f"weight has shape {tuple(weight.shape)}: a scale needs at least one number")
    scale = widened(weight).abs().mean()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _ternary(weight: Tensor, scale: Tensor) -> Tensor:
    return (widened(weight) / scale).round().clamp(-1, 1)


class _Ternary(Function):
    # Not clipped, because the absmean scale leaves about half of the weights outside -G to G.
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        return (_ternary(weight, scale) * scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _round_tokens(x: Tensor, bits: int) -> Tensor:
    if not x.numel():
        return x
    rows = x.reshape(-1, x.shape[-1])
    grid: IntegerGrid = choose_grid(rows.detach(), bits, dim=0)
    least, most = integer_range(bits)
    return fake_quantize_ste(rows, grid.scale, 0, least, most).view(x.shape)
