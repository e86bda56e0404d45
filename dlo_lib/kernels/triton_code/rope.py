"""Kernel of ``dlo_lib.kernels.rope``. A program rotates HEADS heads of POSITIONS positions, so that the
angles of a position are read from memory once for its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import cdiv, row_block
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.rows import load, store
from dlo_lib.kernels.triton_code.tuning import planned, tuned


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, heads, seq, half, blocks_of_heads, blocks_of_seq,
    x_batch, x_head, x_pos, x_dim, y_batch, y_head, y_pos, y_dim, angle_pos, angle_dim,
    SIGN: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = program // blocks_of_heads
    batch, first_pos = (place // blocks_of_seq).to(tl.int64), place % blocks_of_seq * POSITIONS
    row, dim = tl.arange(0, POSITIONS * HEADS)[:, None], tl.arange(0, HALF)[None, :]
    head = program % blocks_of_heads * HEADS + row % HEADS
    pos = first_pos + row // HEADS
    # All heads of a position load its angles, which the cache has after the first one: a single row of angles
    # would have another layout than the tile, and pass through shared memory.
    angle = pos.to(tl.int64) * angle_pos + dim * angle_dim
    angle_mask = (pos < seq) & (dim < half)
    cos = load(cos_ptr + angle, angle_mask, 0.0, EVEN).to(tl.float32)
    sin = load(sin_ptr + angle, angle_mask, 0.0, EVEN).to(tl.float32) * SIGN
    mask = (head < heads) & (pos < seq) & (dim < half)
    x_at = x_ptr + batch * x_batch + head.to(tl.int64) * x_head + pos.to(tl.int64) * x_pos + dim * x_dim
    first = load(x_at, mask, 0.0, EVEN).to(tl.float32)
    second = load(x_at + half * x_dim, mask, 0.0, EVEN).to(tl.float32)
    y_at = y_ptr + batch * y_batch + head.to(tl.int64) * y_head + pos.to(tl.int64) * y_pos + dim * y_dim
    store(y_at, first * cos - second * sin, mask, EVEN)
    store(y_at + half * y_dim, second * cos + first * sin, mask, EVEN)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return x (batch, heads, seq, head_dim), rotated by the angles times ``sign``, with the strides of x if
    they are dense; cos and sin are (seq, head_dim / 2) and have the same strides."""
    y = torch.empty_like(x)
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    _prepare(x.device, x.dtype, cos.dtype, x.shape, x.stride(), y.stride(), cos.stride(), sign)(
        x, cos, sin, y
    )
    return y


@planned
def _prepare(
    device: torch.device, dtype: torch.dtype, angles: torch.dtype, shape: torch.Size,
    x_strides: tuple[int, ...], y_strides: tuple[int, ...], angle_strides: tuple[int, ...], sign: int,
) -> PreparedLaunch:  # fmt: skip
    batch, heads, seq, dim = shape
    half = dim // 2
    tiles = tuned("rope", device, heads=heads, half=half)
    block, held, positions = row_block(half), tiles["HEADS"], tiles["POSITIONS"]
    even = block == half and heads % held == 0 and seq % positions == 0
    of_heads, of_seq = cdiv(heads, held), cdiv(seq, positions)
    numbers = (heads, seq, half, of_heads, of_seq, *x_strides, *y_strides, *angle_strides)
    meta = {"SIGN": sign, "HALF": block, "EVEN": even, **tiles}
    return PreparedLaunch(_rope_kernel, batch * of_heads * of_seq if dim else 0, numbers, meta)
