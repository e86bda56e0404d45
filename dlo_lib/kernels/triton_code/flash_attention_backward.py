"""The kernels of the backward of ``flash_attention.py``.

A program of the gradient of q holds a tile of queries of one head and reads the tiles of keys and values. A
program of the gradients of k and v holds a tile of keys of one key head and reads the tiles of queries of all
heads that share it, so that no two programs write one element.
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
def _dq_step(
    q, grad, acc, lse, delta, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    ODD: tl.constexpr = MASKED and not EVEN
    k = load_tile(k_at, 0, first, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    v = load_tile(v_at, 0, first, seq_k, 0, v_s, v_d, BULK, ODD, DIM, COLS, DIMS)
    scores = dot(q, tl.trans(k))
    grad_weights = dot(grad, tl.trans(v))
    grad_scores = _grad_scores(
        scores, grad_weights, lse, delta, first, rows, seq_k, scale, CAUSAL, MASKED, EVEN, COLS
    )
    return dot(grad_scores.to(k.dtype), k, acc)


@triton.jit
def _grad_scores(
    scores, grad_weights, lse, delta, first, rows, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    weights = tl.exp2(scores * scale - lse[:, None])
    if MASKED:
        cols = first + tl.arange(0, COLS)
        weights = tl.where(allowed_pairs(rows[:, None], cols[None, :], seq_k, CAUSAL, EVEN), weights, 0.0)
    return weights * (grad_weights - delta[:, None])


@triton.jit
def _dq_ahead_step(
    q, grad, grad_scores, acc, lse, delta, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """A step that computes the weights of a tile while the tensor cores add the product of the tile before,
    as in the forward."""
    ODD: tl.constexpr = MASKED and not EVEN
    k = load_tile(k_at, 0, first, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    scores = dot(q, tl.trans(k))
    v = load_tile(v_at, 0, first, seq_k, 0, v_s, v_d, BULK, ODD, DIM, COLS, DIMS)
    grad_weights = dot(grad, tl.trans(v))
    before = first - COLS
    if not BULK:
        before = tl.maximum(before, 0)
    k_before = load_tile(k_at, 0, before, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    acc = dot(grad_scores.to(k.dtype), k_before, acc)
    grad_scores = _grad_scores(
        scores, grad_weights, lse, delta, first, rows, seq_k, scale, CAUSAL, MASKED, EVEN, COLS
    )
    return grad_scores, acc


@triton.jit(do_not_specialize=COUNTS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, grad_ptr, lse_ptr, rows_ptr, dq_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d, g_b, g_h, g_s, g_d,
    dq_b, dq_h, dq_s, dq_d, numbers, heads, group, seq_q, seq_k, padded, section, scale,
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
    o_ptr += batch * o_b + head * o_h
    grad_ptr += batch * g_b + head * g_h
    q_ptr += batch * q_b + head * q_h
    out = load_tile(o_ptr, 0, start, seq_q, 0, o_s, o_d, False, True, DIM, ROWS, DIMS)
    grad = load_tile(grad_ptr, 0, start, seq_q, 0, g_s, g_d, False, True, DIM, ROWS, DIMS)
    # For the kernel of dk and dv, which runs next: (batch * heads, 2, padded), -lse in the unit of
    # the scores before the scale, and -delta.
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + number.to(tl.int64) * seq_q + rows, mask=rows < seq_q, other=0.0) * LOG2_E
    rows_at = rows_ptr + number.to(tl.int64) * (2 * padded) + rows
    tl.store(rows_at, lse * (-1.0 / scale), mask=rows < seq_q)
    tl.store(rows_at + padded, -delta, mask=rows < seq_q)
    q = load_tile(q_ptr, 0, start, seq_q, 0, q_s, q_d, False, True, DIM, ROWS, DIMS)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    unmasked, end = key_range(start, seq_k, CAUSAL, ROWS, COLS)
    if AHEAD:
        grad_scores = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, unmasked, COLS):
            grad_scores, acc = _dq_ahead_step(
                q, grad, grad_scores, acc, lse, delta, k_at, v_at, first, rows,
                k_s, k_d, v_s, v_d, seq_k, scale, CAUSAL, False, EVEN, BULK, DIM, COLS, DIMS,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            for first in range(unmasked, end, COLS):
                grad_scores, acc = _dq_ahead_step(
                    q, grad, grad_scores, acc, lse, delta, k_at, v_at, first, rows,
                    k_s, k_d, v_s, v_d, seq_k, scale, CAUSAL, True, EVEN, BULK, DIM, COLS, DIMS,
                )  # fmt: skip
        last = (tl.cdiv(end, COLS) - 1) * COLS
        k = load_tile(k_at, 0, last, seq_k, 0, k_s, k_d, BULK, not EVEN, DIM, COLS, DIMS)
        acc = dot(grad_scores.to(k.dtype), k, acc)
    else:
        for first in range(0, unmasked, COLS):
            acc = _dq_step(
                q, grad, acc, lse, delta, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
                CAUSAL, False, EVEN, BULK, DIM, COLS, DIMS,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            for first in range(unmasked, end, COLS):
                acc = _dq_step(
                    q, grad, acc, lse, delta, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
                    CAUSAL, True, EVEN, BULK, DIM, COLS, DIMS,
                )  # fmt: skip
    dims = tl.arange(0, DIMS)
    dq_at = dq_ptr + batch * dq_b + head * dq_h + rows.to(tl.int64)[:, None] * dq_s + dims[None, :] * dq_d
    tl.store(dq_at, acc * (scale / LOG2_E), mask=(rows[:, None] < seq_q) & (dims[None, :] < DIM))


@triton.jit
def _row_values(
    source, line, first, length, padded, EVEN: tl.constexpr, BULK: tl.constexpr, ROWS: tl.constexpr
):
    """The values (ROWS,) of a line of -lse or -delta; 0 outside.

    The copy engine writes to multiples of 128 bytes, 32 values, and Triton packs the buffers of a pipeline.
    Fewer values are read by pointers: with 16 the second buffer would begin at byte 64, which stops the GPU
    with a misaligned address.
    """
    if BULK and ROWS >= 32:
        return source.load([line, first]).reshape(ROWS)
    else:
        rows = first + tl.arange(0, ROWS)
        at = source + tl.cast(line, tl.int64) * padded + rows
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=rows < length, other=0.0)


@triton.jit
def _dkv_step(
    k, v, dk, dv, q_at, grad_at, rows_at, head, first, cols, q_h, q_s, q_d, g_h, g_s, g_d,
    seq_q, padded, scale, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    # The sums of both products begin with -lse and -delta, so that no register holds these. A query outside
    # of the sequence adds 0, because q, grad, lse and delta are 0.
    q = load_tile(q_at, head, first, seq_q, q_h, q_s, q_d, BULK, not EVEN, DIM, ROWS, DIMS)
    lse = _row_values(rows_at, 2 * head, first, seq_q, padded, EVEN, BULK, ROWS)
    begin = tl.broadcast_to(lse[None, :], (COLS, ROWS))
    if MASKED:
        rows = first + tl.arange(0, ROWS)
        begin = tl.where(rows[None, :] >= cols[:, None], begin, float("-inf"))
    scores = dot(k, tl.trans(q), begin)
    grad = load_tile(grad_at, head, first, seq_q, g_h, g_s, g_d, BULK, not EVEN, DIM, ROWS, DIMS)
    delta = _row_values(rows_at, 2 * head + 1, first, seq_q, padded, EVEN, BULK, ROWS)
    grad_weights = dot(v, tl.trans(grad), tl.broadcast_to(delta[None, :], (COLS, ROWS)))
    weights = tl.exp2(scores * scale)
    grad_scores = weights * grad_weights
    # Both products are last, because registers that a product reads cannot change while another one runs.
    dv = dot(weights.to(grad.dtype), grad, dv)
    dk = dot(grad_scores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, rows_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_s, g_d,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d, numbers, kv_heads, group, seq_q, seq_k, padded, section,
    scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, STAGES: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tile, number = program_place(tl.cdiv(seq_k, COLS), numbers, section, False)
    start, batch, kv_head = tile * COLS, (number // kv_heads).to(tl.int64), (number % kv_heads).to(tl.int64)
    cols = start + tl.arange(0, COLS)
    q_ptr += batch * q_b + kv_head * group * q_h
    grad_ptr += batch * g_b + kv_head * group * g_h
    q_at = tile_source(q_ptr, group, seq_q, q_h, q_s, BULK, DIM, ROWS, DIMS)
    grad_at = tile_source(grad_ptr, group, seq_q, g_h, g_s, BULK, DIM, ROWS, DIMS)
    rows_at = rows_ptr + number.to(tl.int64) * (2 * group * padded)
    if BULK and ROWS >= 32:  # as in _row_values
        rows_at = tl.make_tensor_descriptor(rows_at, [2 * group, seq_q], [padded, 1], [1, ROWS])
    k_ptr += batch * k_b + kv_head * k_h
    v_ptr += batch * v_b + kv_head * v_h
    k = load_tile(k_ptr, 0, start, seq_k, 0, k_s, k_d, False, True, DIM, COLS, DIMS)
    v = load_tile(v_ptr, 0, start, seq_k, 0, v_s, v_d, False, True, DIM, COLS, DIMS)
    dk = tl.zeros((COLS, DIMS), tl.float32)
    dv = tl.zeros((COLS, DIMS), tl.float32)
    # Tiles of queries: those before ``low`` read no key of this tile, those from ``full`` on read all.
    tiles = tl.cdiv(seq_q, ROWS)
    low, full = 0, 0
    if CAUSAL:
        low, full = tl.minimum(start // ROWS, tiles), tl.minimum(tl.cdiv(start + COLS - 1, ROWS), tiles)
        for step in tl.range(0, group * (full - low), num_stages=STAGES):
            dk, dv = _dkv_step(
                k, v, dk, dv, q_at, grad_at, rows_at, step // (full - low),
                (low + step % (full - low)) * ROWS, cols, q_h, q_s, q_d, g_h, g_s, g_d, seq_q, padded, scale,
                True, EVEN, BULK, DIM, ROWS, COLS, DIMS,
            )  # fmt: skip
    for step in tl.range(0, group * (tiles - full), num_stages=STAGES):
        dk, dv = _dkv_step(
            k, v, dk, dv, q_at, grad_at, rows_at, step // (tiles - full),
            (full + step % (tiles - full)) * ROWS, cols, q_h, q_s, q_d, g_h, g_s, g_d, seq_q, padded, scale,
            False, EVEN, BULK, DIM, ROWS, COLS, DIMS,
        )  # fmt: skip
    mask = (cols[:, None] < seq_k) & (tl.arange(0, DIMS)[None, :] < DIM)
    cols, dims = cols.to(tl.int64), tl.arange(0, DIMS)
    dk_at = dk_ptr + batch * dk_b + kv_head * dk_h + cols[:, None] * dk_s + dims[None, :] * dk_d
    dv_at = dv_ptr + batch * dv_b + kv_head * dv_h + cols[:, None] * dv_s + dims[None, :] * dv_d
    tl.store(dk_at, dk * (scale / LOG2_E), mask=mask)
    tl.store(dv_at, dv, mask=mask)
