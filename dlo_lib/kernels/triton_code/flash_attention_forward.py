"""The kernel of the forward of ``flash_attention.py``.

A program holds a tile of queries of one head and reads the tiles of keys and values. Exponentials have base
2, which is what a GPU computes; lse is stored with base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlo_lib.kernels.triton_code.flash_attention_tiles import (
    COUNTS,
    LOG2_E,
    allowed_pairs,
    key_range,
    load_tile,
    program_place,
    tile_source,
)
from dlo_lib.kernels.triton_code.products import dot


@triton.jit
def _forward_step(
    q, acc, largest, total, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    ODD: tl.constexpr = MASKED and not EVEN
    k = load_tile(k_at, 0, first, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    scores = dot(q, tl.trans(k))
    weights, largest, total, shrink = _softmax_step(
        scores, largest, total, first, rows, seq_k, scale, CAUSAL, MASKED, EVEN, COLS
    )
    v = load_tile(v_at, 0, first, seq_k, 0, v_s, v_d, BULK, ODD, DIM, COLS, DIMS)
    acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, largest, total


@triton.jit
def _softmax_step(
    scores, largest, total, first, rows, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, with the new maximum and sum of its rows, and the factor of the old sums."""
    if MASKED:
        cols = first + tl.arange(0, COLS)
        allowed = allowed_pairs(rows[:, None], cols[None, :], seq_k, CAUSAL, EVEN)
        scores = tl.where(allowed, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    shrink = tl.exp2(largest - new)
    return weights, new, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _ahead_step(
    q, weights, shrink, acc, largest, total, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """A step that computes the softmax of a tile while the tensor cores add the values of the tile before.

    The weights stay in fp32 until the next step, because registers that a product reads cannot change before
    it ends. The first step adds a tile with weights of 0: one outside of the tensor, which a bulk copy reads
    as 0, or the first one.
    """
    ODD: tl.constexpr = MASKED and not EVEN
    k = load_tile(k_at, 0, first, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    scores = dot(q, tl.trans(k))
    before = first - COLS
    if not BULK:
        before = tl.maximum(before, 0)
    v = load_tile(v_at, 0, before, seq_k, 0, v_s, v_d, BULK, ODD, DIM, COLS, DIMS)
    acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    weights, largest, total, shrink = _softmax_step(
        scores, largest, total, first, rows, seq_k, scale, CAUSAL, MASKED, EVEN, COLS
    )
    return weights, shrink, acc, largest, total


@triton.jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    o_b, o_h, o_s, o_d, numbers, heads, group, seq_q, seq_k, section, scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, AHEAD: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tile, number = program_place(tl.cdiv(seq_q, ROWS), numbers, section, CAUSAL)
    start, batch, head = tile * ROWS, (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows = start + tl.arange(0, ROWS)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    k_at = tile_source(k_ptr, 1, seq_k, k_h, k_s, BULK, DIM, COLS, DIMS)
    v_at = tile_source(v_ptr, 1, seq_k, v_h, v_s, BULK, DIM, COLS, DIMS)
    q_ptr += batch * q_b + head * q_h
    q = load_tile(q_ptr, 0, start, seq_q, 0, q_s, q_d, False, True, DIM, ROWS, DIMS)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    unmasked, end = key_range(start, seq_k, CAUSAL, ROWS, COLS)
    if AHEAD:
        weights = tl.zeros((ROWS, COLS), tl.float32)
        shrink = tl.zeros((ROWS,), tl.float32)
        for first in range(0, unmasked, COLS):
            weights, shrink, acc, largest, total = _ahead_step(
                q, weights, shrink, acc, largest, total, k_at, v_at, first, rows,
                k_s, k_d, v_s, v_d, seq_k, scale, CAUSAL, False, EVEN, BULK, DIM, COLS, DIMS,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            for first in range(unmasked, end, COLS):
                weights, shrink, acc, largest, total = _ahead_step(
                    q, weights, shrink, acc, largest, total, k_at, v_at, first, rows,
                    k_s, k_d, v_s, v_d, seq_k, scale, CAUSAL, True, EVEN, BULK, DIM, COLS, DIMS,
                )  # fmt: skip
        last = (tl.cdiv(end, COLS) - 1) * COLS
        v = load_tile(v_at, 0, last, seq_k, 0, v_s, v_d, BULK, not EVEN, DIM, COLS, DIMS)
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    else:
        for first in range(0, unmasked, COLS):
            acc, largest, total = _forward_step(
                q, acc, largest, total, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
                CAUSAL, False, EVEN, BULK, DIM, COLS, DIMS,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            for first in range(unmasked, end, COLS):
                acc, largest, total = _forward_step(
                    q, acc, largest, total, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
                    CAUSAL, True, EVEN, BULK, DIM, COLS, DIMS,
                )  # fmt: skip
    dims = tl.arange(0, DIMS)
    o_at = o_ptr + batch * o_b + head * o_h + rows.to(tl.int64)[:, None] * o_s + dims[None, :] * o_d
    tl.store(o_at, acc / total[:, None], mask=(rows[:, None] < seq_q) & (dims[None, :] < DIM))
    lse = (largest + tl.log2(total)) / LOG2_E
    tl.store(lse_ptr + number.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)
