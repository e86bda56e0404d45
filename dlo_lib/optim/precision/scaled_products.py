"""Matrix products of 8-bit operands on the tensor cores that have them, with ``torch._scaled_mm``.

    y = (x8 w8^T) / (s_x s_w)        x8 = round(s_x x) in E4M3,  w8 = round(s_w w) in E4M3

``fp8`` emulates the same products: forward in E4M3, the gradient of the output in E5M2, one scale for each
tensor from its own largest absolute value. Here the product itself reads 8 bits, at twice the rate of bf16.
In return each operand is read once more for its scale and once for the rounding, and the second operand of a
product must be stored by columns, so that backward transposes three of them. ``torch.compile`` fuses these
passes; without it they cost more than the products gain.

Cost: 1 byte for each element of an input that is saved for backward, instead of 2.

Paper: P. Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.fp8 import E4M3, E5M2, FP8Linear, FP8Tensor, quantize
from dlo_lib.optim.precision.scaling import CurrentScaling

MULTIPLE = 16
"""The sizes of a product are multiples of this number."""
CAPABILITY = (8, 9)
"""The compute capability of the first GPUs with 8-bit tensor cores."""


def scaled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, (..., out) in the dtype of ``x``, with 8-bit operands, differentiable.

    Args:
        x: (..., in) fp16 or bf16.
        weight: (out, in) fp32, fp16 or bf16; its gradient has its dtype.

    Raises:
        UserError: a size is not a multiple of 16.
    """
    for name, size in (("rows of x", x[..., 0].numel()), ("in", weight.shape[1]), ("out", weight.shape[0])):
        if size % MULTIPLE:
            raise UserError(f"8-bit products need sizes in multiples of {MULTIPLE}, and {name} is {size}")
    return _ScaledMatmul.apply(x, weight)


class ScaledLinear(FP8Linear):
    """A linear layer whose three products have 8-bit operands, on a GPU of ``CAPABILITY`` or later; a CPU
    computes them slowly. Inside autocast, the other operand and the output have its dtype."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        out = scaled_matmul(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _ScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = _quantized(x.flatten(0, -2), E4M3), _quantized(weight, E4M3)
        ctx.save_for_backward(x8.data, x8.scale, w8.data, w8.scale)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        return _product(x8, _turned(w8), x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        g8 = _quantized(grads[0].flatten(0, -2), E5M2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            w8 = FP8Tensor(_by_columns(w_data), w_scale)
            grad_x = _product(g8, w8, ctx.dtypes[0]).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            turned = FP8Tensor(g8.data.t().contiguous(), g8.scale)
            grad_weight = _product(turned, FP8Tensor(_by_columns(x_data), x_scale), ctx.dtypes[1])
        return grad_x, grad_weight


def _quantized(x: Tensor, to: Any) -> FP8Tensor:
    return quantize(x.contiguous(), to, CurrentScaling())


def _turned(x: FP8Tensor) -> FP8Tensor:
    return FP8Tensor(x.data.t(), x.scale)


def _by_columns(data: Tensor) -> Tensor:
    """Return ``data`` (rows, columns) with its columns contiguous in memory."""
    return data.t().contiguous().t()


def _product(a: FP8Tensor, b: FP8Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return the product of a (m, k), by rows, and b (k, n), by columns, in ``dtype``. ``fast`` sums in fewer
    bits, which is enough for a forward."""
    return torch._scaled_mm(
        a.data,
        b.data,
        scale_a=a.scale.reciprocal(),
        scale_b=b.scale.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
