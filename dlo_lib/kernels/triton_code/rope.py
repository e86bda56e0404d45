"""Kernel of ``dlo_lib.kernels.rope``. A program rotates a block of rows; a row is one head at one
position."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import launch, row_block

ROWS = 16


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, rows, heads, seq, half,
    x_batch, x_head, x_pos, x_dim, y_batch, y_head, y_pos, y_dim, angle_pos, angle_dim,
    SIGN: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = (row < rows) & (dim < half)
    batch, head, pos = row // (heads * seq), row // seq % heads, row % seq
    cos = tl.load(cos_ptr + pos * angle_pos + dim * angle_dim, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + pos * angle_pos + dim * angle_dim, mask=mask, other=0.0).to(tl.float32) * SIGN
    x_at = x_ptr + batch * x_batch + head * x_head + pos * x_pos + dim * x_dim
    first = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + half * x_dim, mask=mask, other=0.0).to(tl.float32)
    y_at = y_ptr + batch * y_batch + head * y_head + pos * y_pos + dim * y_dim
    tl.store(y_at, first * cos - second * sin, mask=mask)
    tl.store(y_at + half * y_dim, second * cos + first * sin, mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return x (batch, heads, seq, head_dim), rotated by the angles times ``sign``, with the strides of x if
    they are dense; cos and sin are (seq, head_dim / 2) and have the same strides."""
    y = torch.empty_like(x)
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, seq, dim = x.shape
    rows = batch * heads * seq
    launch(
        _rope_kernel, (triton.cdiv(rows, ROWS) if dim else 0,),
        x, cos, sin, y, rows, heads, seq, dim // 2, *x.stride(), *y.stride(), *cos.stride(),
        SIGN=sign, ROWS=ROWS, HALF=row_block(dim // 2), num_warps=4,
    )  # fmt: skip
    return y
