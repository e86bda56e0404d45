"""Linear layers with an integer product: int8 x int8, summed exactly in int32.

With x = S_x (q_x - Z_x) for each token and W = S_w q_w for each output channel,

    x W^T + b = S_x S_w (q_x q_w^T - Z_x sum_k q_w) + b

The scales are factors of whole rows and columns of the product, so they are applied once to the result, and
the zero-point is one term for each channel. The static form (``StaticInt8Linear``) uses integers only: its
bias has the scale S_x S_w, and the result is scaled by M 2^-n with an integer M.

LLM.int8(): a few input channels of large models have activations far above the others, which widen the grid
of every token. The columns with a value of at least ``threshold`` are multiplied in floating point:

    x W^T = sum over outlier columns in floating point + sum over the others in int8

Cost: 1 byte a weight; int8 tensor cores have twice the peak of fp16. LLM.int8() adds the product of its
outlier columns, typically below 1 % of all.

Papers: Integer-arithmetic-only inference (arXiv:1712.05877), LLM.int8() (arXiv:2208.07339).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.compress.grid import IntegerGrid, choose_grid, integer_range, quantize, widened

LARGEST_K = (2**31 - 1) // 128**2
"""The number of products of int8 whose sum always fits int32: 131,071."""


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T for int8 ``a`` (m, k) and ``b`` (n, k), exact: int32 (m, n).

    It uses ``torch._int_mm`` where that is exact, otherwise a product in fp64, in which sums of fewer than
    2^39 products of int8 are exact.

    Raises:
        UserError: a tensor is not int8, the shapes do not fit, or k exceeds ``LARGEST_K``.
    """
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise UserError(f"a is {a.dtype} and b is {b.dtype}: both should be int8")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise UserError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: use (m, k) and (n, k)")
    if a.shape[1] > LARGEST_K:
        raise UserError(f"k is {a.shape[1]}: a sum in int32 is exact up to {LARGEST_K}, split the columns")
    if a.numel() and b.numel() and a.device.type == "cpu" and _native_is_exact():
        return torch._int_mm(a.contiguous(), b.contiguous().t())
    return (a.double() @ b.double().t()).to(torch.int32)


@cache
def _native_is_exact() -> bool:
    """Whether ``torch._int_mm`` is exact here: processors without VNNI can saturate sums of two products."""
    signs = torch.tensor([-128, 127], dtype=torch.int8)
    a = signs[torch.arange(5 * 67).view(5, 67) % 3 % 2]
    b = signs[torch.arange(3 * 67).view(3, 67) % 5 % 2]
    try:
        found = [torch._int_mm(x, y.t()) for x, y in ((a, b), (a, a), (b, b), (a[:1], b[:1]))]
    except (RuntimeError, AttributeError):
        return False
    exact = [x.long() @ y.long().t() for x, y in ((a, b), (a, a), (b, b), (a[:1], b[:1]))]
    return all(torch.equal(x.long(), y) for x, y in zip(found, exact, strict=True))


class Int8Linear(nn.Module):
    """A linear layer with int8 weights for each output channel and a grid for each token, chosen in each
    call.

    Maps (..., in) to (..., out) in the dtype of the input. The buffers: ``weight_q`` int8 (out, in),
    ``weight_scale`` (out,), ``weight_sum`` int32 (out,), the sums of the rows, and ``bias`` (out,) if any.

    Args:
        linear: the layer.
        symmetric: whether the grids of tokens are absmax grids.
        threshold: multiply the input columns with an absolute value of at least this in floating point, with
            the dequantized weight (LLM.int8(), 6.0 in the paper); None: no column.

    Raises:
        UserError: the weight contains NaN or infinity.
    """

    weight_q: Tensor
    weight_scale: Tensor
    weight_sum: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, symmetric: bool = True, threshold: float | None = None) -> None:
        super().__init__()
        if threshold is not None and not threshold > 0:
            raise UserError(f"threshold is {threshold}: use a positive number, such as 6.0, or None")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.symmetric, self.threshold = symmetric, threshold
        _register_weight(self, linear)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def outlier_columns(self, x: Tensor) -> Tensor:
        """Return the indices of the columns of ``x`` (tokens, in) that are multiplied in floating point."""
        if self.threshold is None or not x.numel():
            return torch.empty(0, dtype=torch.int64, device=x.device)
        return (x.abs().amax(0) >= self.threshold).nonzero().flatten()

    def forward(self, x: Tensor) -> Tensor:
        rows = widened(x.reshape(-1, self.in_features))
        if not rows.numel():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        columns = self.outlier_columns(rows)
        regular = rows.index_fill(1, columns, 0) if len(columns) else rows
        grid = choose_grid(regular, 8, self.symmetric, dim=0)
        # Outlier columns are 0 in regular, and the integer of 0 is the zero-point, which the sum removes.
        product = int8_matmul(quantize(regular, grid), self.weight_q)
        product = product.to(rows.dtype) - grid.zero_point.to(rows.dtype) * self.weight_sum.to(rows.dtype)
        y = product * grid.scale * self.weight_scale
        if len(columns):
            weight = self.weight_q[:, columns].to(rows.dtype) * self.weight_scale[:, None]
            y = y + rows[:, columns] @ weight.to(rows.dtype).t()
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, symmetric={self.symmetric}, threshold={self.threshold}"
        )


class StaticInt8Linear(nn.Module):
    """A linear layer of integers only: maps int8 (..., in) on ``input_grid`` to int8 (..., out) on
    ``output_grid``.

    The zero-point of the input is folded into the bias:  round(b / (S_x S_w)) - Z_x sum_k q_w,  int32. The
    buffers: ``weight_q`` int8 (out, in), ``weight_scale`` (out,), ``weight_sum`` and ``bias_q`` int32 (out,),
    ``multiplier`` and ``shift`` int64 (out,) with  S_x S_w / S_y = multiplier 2^-shift  to 31 bits.

    Args:
        linear: the layer.
        input_grid, output_grid: for whole tensors, such as those of an observer; 8 bits.

    Raises:
        UserError: a grid is not for a whole tensor, or the bias or the factor is too large for int32.
    """

    weight_q: Tensor
    weight_scale: Tensor
    weight_sum: Tensor
    bias_q: Tensor
    multiplier: Tensor
    shift: Tensor

    def __init__(self, linear: nn.Linear, input_grid: IntegerGrid, output_grid: IntegerGrid) -> None:
        super().__init__()
        if input_grid.scale.dim() or output_grid.scale.dim():
            raise UserError(
                "a grid has several scales: static quantization needs one scale for the whole tensor"
            )
        self.input_grid, self.output_grid = input_grid, output_grid
        _register_weight(self, linear)
        scale = self.weight_scale.double() * float(input_grid.scale)
        bias = torch.zeros_like(scale) if linear.bias is None else linear.bias.detach().double()
        folded = (bias / scale).round() - int(input_grid.zero_point) * self.weight_sum
        room = 2**31 - 1 - 128**2 * linear.in_features
        if float(folded.abs().max()) > room:
            raise UserError("the bias is too large for int32: widen the grid of the input")
        multiplier, shift = fixed_point(scale / float(output_grid.scale))
        self.register_buffer("bias_q", folded.to(torch.int32))
        self.register_buffer("multiplier", multiplier)
        self.register_buffer("shift", shift)

    def forward(self, q: Tensor) -> Tensor:
        total = int8_matmul(q.reshape(-1, q.shape[-1]), self.weight_q) + self.bias_q
        # int32 x 31 bits fits int64. Half of the last place is added, so that the shift rounds.
        scaled = (total.long() * self.multiplier + (1 << (self.shift - 1))) >> self.shift
        least, most = integer_range(self.output_grid.bits, self.output_grid.symmetric)
        out = (scaled + int(self.output_grid.zero_point)).clamp(least, most).to(torch.int8)
        return out.view(*q.shape[:-1], -1)


def fixed_point(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers m < 2^31 and n, both int64 of the shape of ``factor``, with factor = m 2^-n to 31 bits.

    Raises:
        UserError: a factor is not positive, or at least 2^30.
    """
    if float(factor.min()) <= 0 or float(factor.max()) >= 2.0**30:
        raise UserError(
            "a factor of the integer form is not between 0 and 2^30: check the scales of both grids"
        )
    mantissa, exponent = torch.frexp(factor.double())
    multiplier, shift = (mantissa * 2**31).round().long(), 31 - exponent.long()
    # A mantissa that rounds to 2^31 needs one bit fewer; a shift above 62 leaves no bit of the product.
    full = multiplier == 2**31
    multiplier, shift = torch.where(full, 2**30, multiplier), torch.where(full, shift - 1, shift)
    return torch.where(shift > 62, torch.zeros_like(multiplier), multiplier), shift.clamp(1, 62)


def _register_weight(module: nn.Module, linear: nn.Linear) -> None:
    weight = linear.weight.detach()
    grid = choose_grid(weight, 8, dim=0)
    q = quantize(weight, grid)
    module.register_buffer("weight_q", q)
    module.register_buffer("weight_scale", grid.scale.flatten())
    module.register_buffer("weight_sum", q.sum(1, dtype=torch.int32))
