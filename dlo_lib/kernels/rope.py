"""Rotary positions (RoPE): one read and one write of each element, and nothing of the input saved.

Element i of the first half of a head and element i of the second half are rotated by the angle of their
position:
    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin
The backward is the rotation by the opposite angle, so that it needs the angles only. Written with a
concatenation of halves, the forward writes four temporary tensors of the size of x.

Inside autocast, queries and keys have 16 bits and the angles are fp32, because the embedding is fp32.
PyTorch's operators, and so ``models.llama`` and transformers, then compute in fp32 and return fp32, which
attention rounds. This operation computes in fp32 too, and rounds its result itself: attention receives the
same values, through half of the memory. A product in 16 bits would also round the angles, and its error would
be 1.5 times as large.

Paper: RoFormer (arXiv:2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for,
    is_recorded,
    once_differentiable,
    require_floating,
    require_shape,
    run,
    uses_operators,
)
from dlo_lib.models.llama import apply_rope


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of ``x`` by the angles of their positions.

    Args:
        x: (batch, heads, seq, head_dim), floating-point, with any strides. head_dim is even.
        cos, sin: (seq, head_dim), of which the two halves are equal, as ``models.llama.rotation`` returns
            them. They have no gradient.

    Returns:
        (batch, heads, seq, head_dim) in the dtype of ``x``.

    Raises:
        UserError: the shapes do not fit, or ``x`` is not floating-point.
    """
    require_floating("x", x)
    if x.ndim != 4 or x.shape[-1] % 2:
        raise UserError(
            f"x has shape {tuple(x.shape)}: it should be (batch, heads, seq, head_dim) with an even head_dim"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        require_shape(name, table, x.shape[2:], "the last two dimensions of x")
    if uses_operators("rope", x):
        return apply_rope(x, cos, sin).to(x.dtype)
    half = x.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    backend = backend_for(x)
    if is_recorded(x):
        return apply(_Rope, x, cos, sin, backend)
    return run(backend, "rope", rotate, x, cos, sin, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate in PyTorch, by the angles times ``sign``; cos and sin are (seq, head_dim / 2)."""
    wide = torch.promote_types(x.dtype, cos.dtype)
    if wide is not x.dtype:  # angles in fp32, as inside autocast: round once, as the kernel does
        return rotate(x.to(wide), cos, sin, sign).to(x.dtype)
    out = torch.empty_like(x)
    (x1, x2), (y1, y2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    torch.mul(x1, cos, out=y1)
    torch.mul(x2, cos, out=y2)
    y1.addcmul_(x2, sin, value=-sign)
    y2.addcmul_(x1, sin, value=sign)
    return out


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, backend: KernelBackend) -> Tensor:
        ctx.backend = backend
        ctx.save_for_backward(cos, sin)
        return run(backend, "rope", rotate, x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return run(ctx.backend, "rope", rotate, grad, cos, sin, -1), None, None, None
