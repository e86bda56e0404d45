"""Linear layers whose weight is stored in 8 or 4 bits: the input and the product stay in floating point.

    y = x dequantize(Q)^T + bias        Q (out, in) on a grid for each row, or each group of a row

A decoder reads every weight for each token that it generates, so time and memory follow the stored bytes. In
PyTorch the weight is dequantized for each call, which saves memory and not time; a fused kernel dequantizes
in registers.

Cost of int4 in groups of g: 1/2 + 4/g bytes a weight; of int8 for each row: 1 + 4/in. An asymmetric grid has
one byte more for each group.

Paper: weight-only quantization by groups is the setting of GPTQ (arXiv:2210.17323).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.compress.grid import IntegerGrid, choose_grid, dequantize, grouped, quantize
from dlo_lib.compress.packing import pack_int4, unpack_int4


class QuantizedLinear(nn.Module):
    """A linear layer with a stored weight of 8 or 4 bits: maps (..., in_features) to (..., out_features).

    The buffers, which ``state_dict`` saves: ``packed``, int8 (out, in) or uint8 (out, ceil(in / 2));
    ``scale`` (out, groups); ``zero_point`` int8 of the same shape if the grid is asymmetric; ``bias``
    (out,) if there is one.

    Args:
        in_features, out_features: as in ``nn.Linear``.
        bias: whether there is a bias.
        bits: 8 or 4.
        group_size: the inputs that share a scale; None: all of a row.
        symmetric: whether the grid has zero-point 0.
        device: of the buffers.
        dtype: of scale and bias.

    Raises:
        UserError: ``bits`` is another number, or ``group_size`` does not divide ``in_features``.
    """

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        bits: int = 4,
        group_size: int | None = None,
        symmetric: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise UserError(f"bits is {bits}: a stored weight has 4 or 8")
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.symmetric = bits, symmetric
        self.group_size = in_features if group_size is None else group_size
        groups = grouped(torch.empty(in_features, device="meta"), self.group_size).shape[0]
        columns, kind = (in_features, torch.int8) if bits == 8 else (-(-in_features // 2), torch.uint8)
        zeros = torch.zeros(out_features, groups, dtype=torch.int8, device=device)
        self.register_buffer("packed", torch.zeros(out_features, columns, dtype=kind, device=device))
        self.register_buffer("scale", torch.ones(out_features, groups, device=device, dtype=dtype))
        self.register_buffer("zero_point", None if symmetric else zeros)
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int = 4, group_size: int | None = None, symmetric: bool = True
    ) -> QuantizedLinear:
        """Return ``linear`` with its weight rounded to the nearest integers.

        Raises:
            UserError: as the class; the weight contains NaN or infinity.
        """
        weight = linear.weight.detach()
        size = linear.in_features if group_size is None else group_size
        grid = choose_grid(weight, bits, symmetric, group_size=size)
        return cls.from_integers(quantize(weight, grid), grid, linear.bias)

    @classmethod
    def from_integers(cls, q: Tensor, grid: IntegerGrid, bias: Tensor | None = None) -> QuantizedLinear:
        """Return the layer of the integers ``q``, int8 (out, in), on ``grid`` with groups, and of a bias.

        Raises:
            UserError: as the class.
        """
        new = cls(
            q.shape[1],
            q.shape[0],
            bias is not None,
            grid.bits,
            grid.group_size,
            grid.symmetric,
            q.device,
            grid.scale.dtype,
        )
        new.packed.copy_(q if grid.bits == 8 else pack_int4(q))
        new.scale.copy_(grid.scale)
        if new.zero_point is not None:
            new.zero_point.copy_(grid.zero_point)
        if bias is not None:
            new.bias = bias.detach().clone()
        return new

    def rows(self, index: Tensor | None = None) -> Tensor:
        """Return the dequantized weight (out, in), or its rows ``index`` (...): (..., in)."""
        packed, scale, zero = self.packed, self.scale, self.zero_point
        if index is not None:
            packed, scale = packed[index], scale[index]
            zero = None if zero is None else zero[index]
        q = packed if self.bits == 8 else unpack_int4(packed, self.in_features)
        offset = torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero.to(torch.int32)
        return dequantize(q, IntegerGrid(scale, offset, self.bits, self.symmetric, self.group_size))

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.rows().to(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group_size={self.group_size}"


class QuantizedEmbedding(nn.Module):
    """The embedding of a tied ``head``: maps indices (...) int64 to rows of its weight (..., in_features).

    It has no buffers, so that a file contains the weight once: it reads those of the head.
    """

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # A tuple hides the module from PyTorch, which would otherwise save its buffers a second time.
        self._head = (head,)

    def forward(self, index: Tensor) -> Tensor:
        return self._head[0].rows(index).to(self.dtype)
