"""What the kernels of ``flash_attention.py`` share: the order of programs, the loads and the mask.

With ``BULK`` the copy engine of an H100 (TMA) reads the tiles of the loop: one thread requests a tile by
its place in the tensor, where the other form computes an address for each 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
COUNTS = ["numbers", "heads", "kv_heads", "group", "seq_q", "seq_k", "padded", "section"]
"""Integers for whose divisibility no kernel is compiled."""


@triton.jit
def program_place(tiles, numbers, section, LAST_FIRST: tl.constexpr):
    """The tile and the number of the head of this program.

    The heads are processed in sections whose keys and values fit in the L2 cache; in a section the programs
    of one tile number, of all heads, are adjacent. The grid has one dimension, because the others are limited
    to 65,535 programs.
    """
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    width = tl.minimum(section, numbers - first)
    inside = program - first * tiles
    tile = inside // width
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first + inside % width


@triton.jit
def tile_source(
    ptr, heads, length, head_s, row_s, BULK: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """What ``load_tile`` reads from (heads, length, DIM): a descriptor for bulk copies, or the pointer."""
    if BULK:
        return tl.make_tensor_descriptor(
            ptr, shape=[heads, length, DIM], strides=[head_s, row_s, 1], block_shape=[1, LENGTH, DIMS]
        )
    else:
        return ptr


@triton.jit
def load_tile(
    source, head, first, length, head_s, row_s, dim_s, BULK: tl.constexpr, MASKED: tl.constexpr,
    DIM: tl.constexpr, LENGTH: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """The tile (LENGTH, DIMS) from row ``first`` of a head; 0 outside of the tensor."""
    if BULK:
        return source.load([head, first, 0]).reshape(LENGTH, DIMS)
    else:
        offsets, dims = tl.arange(0, LENGTH), tl.arange(0, DIMS)
        at = source + tl.cast(head, tl.int64) * head_s + tl.cast(first, tl.int64) * row_s
        at += offsets[:, None] * row_s + dims[None, :] * dim_s
        if MASKED:
            return tl.load(at, mask=(first + offsets[:, None] < length) & (dims[None, :] < DIM), other=0.0)
        elif DIM < DIMS:
            return tl.load(at, mask=dims[None, :] < DIM, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def allowed_pairs(rows, cols, seq_k, CAUSAL: tl.constexpr, EVEN: tl.constexpr):
    """Which queries (rows, a column vector) read which keys (cols, a row vector)."""
    if CAUSAL and EVEN:
        return rows >= cols
    elif CAUSAL:
        return (rows >= cols) & (cols < seq_k)
    else:
        return (rows >= 0) & (cols < seq_k)


@triton.jit
def key_range(start, seq_k, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where the keys of a tile of queries need a mask, and where they end."""
    if CAUSAL:
        return tl.minimum(start, seq_k) // COLS * COLS, tl.minimum(start + ROWS, seq_k)
    else:
        return seq_k // COLS * COLS, seq_k
