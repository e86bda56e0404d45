"""Kernels of ``dlo_lib.kernels.flash_attention``.

A program of the forward, and of the gradient of q, holds a tile of queries of one head and reads the tiles
of keys. A program of the gradients of k and v holds a tile of keys of one key head and reads the tiles of
queries of all heads that share it, so that no two programs write one element. Tiles that need a mask, on the
diagonal and at the end of the keys, have a loop of their size; the other loop computes and loads without one.
The programs with the most tiles start first. Exponentials have base 2, which is what a GPU computes; lse is
stored with base e.

With ``BULK`` the copy engine of an H100 (TMA) reads the tiles of the loop: one thread requests a tile by
its place in the tensor, where the other form computes an address for each 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import cdiv, launch, power_of_2
from dlo_lib.kernels.triton_code.products import dot
from dlo_lib.kernels.triton_code.tuning import tuned

LOG2_E = tl.constexpr(1.4426950408889634)
COUNTS = ["numbers", "heads", "kv_heads", "group", "seq_q", "seq_k", "padded", "section"]
"""Integers for whose divisibility no kernel is compiled."""


@triton.jit
def _place(tiles, numbers, section, LAST_FIRST: tl.constexpr):
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
def _source(ptr, heads, length, head_s, row_s, BULK: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr,
            DIMS: tl.constexpr):  # fmt: skip
    """What ``_tile`` reads from (heads, length, DIM): a descriptor for bulk copies, or the pointer."""
    if BULK:
        return tl.make_tensor_descriptor(
            ptr, shape=[heads, length, DIM], strides=[head_s, row_s, 1], block_shape=[1, LENGTH, DIMS]
        )
    else:
        return ptr


@triton.jit
def _tile(source, head, first, length, head_s, row_s, dim_s, BULK: tl.constexpr, MASKED: tl.constexpr,
          DIM: tl.constexpr, LENGTH: tl.constexpr, DIMS: tl.constexpr):  # fmt: skip
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
def _allowed(rows, cols, seq_k, CAUSAL: tl.constexpr, EVEN: tl.constexpr):
    """Which queries (rows, a column vector) read which keys (cols, a row vector)."""
    if CAUSAL and EVEN:
        return rows >= cols
    elif CAUSAL:
        return (rows >= cols) & (cols < seq_k)
    else:
        return (rows >= 0) & (cols < seq_k)


@triton.jit
def _forward_step(
    q, acc, largest, total, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    ODD: tl.constexpr = MASKED and not EVEN
    k = _tile(k_at, 0, first, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    scores = dot(q, tl.trans(k))
    weights, largest, total, shrink = _softmax_step(
        scores, largest, total, first, rows, seq_k, scale, CAUSAL, MASKED, EVEN, COLS
    )
    v = _tile(v_at, 0, first, seq_k, 0, v_s, v_d, BULK, ODD, DIM, COLS, DIMS)
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
        allowed = _allowed(rows[:, None], cols[None, :], seq_k, CAUSAL, EVEN)
        scores = tl.where(allowed, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    shrink = tl.exp2(largest - new)
    return weights, new, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _ahead_step(
    q, weights, shrink, acc, largest, total, k_at, v_at, first, rows, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """A step that computes the softmax of a tile while the tensor cores add the values of the tile before.

    The weights stay in fp32 until the next step, because registers that a product reads cannot change before
    it ends. The tile before the first is outside of the tensor, and read as 0.
    """
    k = k_at.load([0, first, 0]).reshape(COLS, DIMS)
    scores = dot(q, tl.trans(k))
    v = v_at.load([0, first - COLS, 0]).reshape(COLS, DIMS)
    acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    weights, largest, total, shrink = _softmax_step(
        scores, largest, total, first, rows, seq_k, scale, CAUSAL, MASKED, EVEN, COLS
    )
    return weights, shrink, acc, largest, total


@triton.jit
def _key_range(start, seq_k, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where the keys of a tile of queries need a mask, and where they end."""
    if CAUSAL:
        return tl.minimum(start, seq_k) // COLS * COLS, tl.minimum(start + ROWS, seq_k)
    else:
        return seq_k // COLS * COLS, seq_k


@triton.jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    o_b, o_h, o_s, o_d, numbers, heads, group, seq_q, seq_k, section, scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, AHEAD: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tile, number = _place(tl.cdiv(seq_q, ROWS), numbers, section, CAUSAL)
    start, batch, head = tile * ROWS, (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows = start + tl.arange(0, ROWS)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    k_at = _source(k_ptr, 1, seq_k, k_h, k_s, BULK, DIM, COLS, DIMS)
    v_at = _source(v_ptr, 1, seq_k, v_h, v_s, BULK, DIM, COLS, DIMS)
    q_ptr += batch * q_b + head * q_h
    q = _tile(q_ptr, 0, start, seq_q, 0, q_s, q_d, False, True, DIM, ROWS, DIMS)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    unmasked, end = _key_range(start, seq_k, CAUSAL, ROWS, COLS)
    if AHEAD:
        weights = tl.zeros((ROWS, COLS), tl.float32)
        shrink = tl.zeros((ROWS,), tl.float32)
        for first in range(0, unmasked, COLS):
            weights, shrink, acc, largest, total = _ahead_step(
                q, weights, shrink, acc, largest, total, k_at, v_at, first, rows, seq_k, scale,
                CAUSAL, False, EVEN, COLS, DIMS,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            for first in range(unmasked, end, COLS):
                weights, shrink, acc, largest, total = _ahead_step(
                    q, weights, shrink, acc, largest, total, k_at, v_at, first, rows, seq_k, scale,
                    CAUSAL, True, EVEN, COLS, DIMS,
                )  # fmt: skip
        v = v_at.load([0, (tl.cdiv(end, COLS) - 1) * COLS, 0]).reshape(COLS, DIMS)
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


@triton.jit
def _dq_step(
    q, grad, acc, lse, delta, k_at, v_at, first, rows, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    ODD: tl.constexpr = MASKED and not EVEN
    k = _tile(k_at, 0, first, seq_k, 0, k_s, k_d, BULK, ODD, DIM, COLS, DIMS)
    v = _tile(v_at, 0, first, seq_k, 0, v_s, v_d, BULK, ODD, DIM, COLS, DIMS)
    scores = dot(q, tl.trans(k))
    grad_weights = dot(grad, tl.trans(v))
    weights = tl.exp2(scores * scale - lse[:, None])
    if MASKED:
        cols = first + tl.arange(0, COLS)
        weights = tl.where(_allowed(rows[:, None], cols[None, :], seq_k, CAUSAL, EVEN), weights, 0.0)
    grad_scores = weights * (grad_weights - delta[:, None])
    return dot(grad_scores.to(k.dtype), k, acc)


@triton.jit(do_not_specialize=COUNTS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, grad_ptr, lse_ptr, rows_ptr, dq_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d, g_b, g_h, g_s, g_d,
    dq_b, dq_h, dq_s, dq_d, numbers, heads, group, seq_q, seq_k, padded, section, scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tile, number = _place(tl.cdiv(seq_q, ROWS), numbers, section, CAUSAL)
    start, batch, head = tile * ROWS, (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows = start + tl.arange(0, ROWS)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    k_at = _source(k_ptr, 1, seq_k, k_h, k_s, BULK, DIM, COLS, DIMS)
    v_at = _source(v_ptr, 1, seq_k, v_h, v_s, BULK, DIM, COLS, DIMS)
    o_ptr += batch * o_b + head * o_h
    grad_ptr += batch * g_b + head * g_h
    q_ptr += batch * q_b + head * q_h
    out = _tile(o_ptr, 0, start, seq_q, 0, o_s, o_d, False, True, DIM, ROWS, DIMS)
    grad = _tile(grad_ptr, 0, start, seq_q, 0, g_s, g_d, False, True, DIM, ROWS, DIMS)
    # For the kernel of dk and dv, which runs next: (batch * heads, 2, padded), -lse in the unit of
    # the scores before the scale, and -delta.
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + number.to(tl.int64) * seq_q + rows, mask=rows < seq_q, other=0.0) * LOG2_E
    rows_at = rows_ptr + number.to(tl.int64) * (2 * padded) + rows
    tl.store(rows_at, lse * (-1.0 / scale), mask=rows < seq_q)
    tl.store(rows_at + padded, -delta, mask=rows < seq_q)
    q = _tile(q_ptr, 0, start, seq_q, 0, q_s, q_d, False, True, DIM, ROWS, DIMS)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    unmasked, end = _key_range(start, seq_k, CAUSAL, ROWS, COLS)
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
def _row_values(source, line, first, length, padded, BULK: tl.constexpr, ROWS: tl.constexpr):
    """The values (ROWS,) of a line of -lse or -delta; 0 outside."""
    if BULK:
        return source.load([line, first]).reshape(ROWS)
    else:
        rows = first + tl.arange(0, ROWS)
        return tl.load(source + tl.cast(line, tl.int64) * padded + rows, mask=rows < length, other=0.0)


@triton.jit
def _dkv_step(
    k, v, dk, dv, q_at, grad_at, rows_at, head, first, cols, q_h, q_s, q_d, g_h, g_s, g_d,
    seq_q, padded, scale, MASKED: tl.constexpr, BULK: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    # The sums of both products begin with -lse and -delta, so that no register holds these. A query outside
    # of the sequence adds 0, because q, grad, lse and delta are 0.
    q = _tile(q_at, head, first, seq_q, q_h, q_s, q_d, BULK, True, DIM, ROWS, DIMS)
    lse = _row_values(rows_at, 2 * head, first, seq_q, padded, BULK, ROWS)
    begin = tl.broadcast_to(lse[None, :], (COLS, ROWS))
    if MASKED:
        rows = first + tl.arange(0, ROWS)
        begin = tl.where(rows[None, :] >= cols[:, None], begin, float("-inf"))
    scores = dot(k, tl.trans(q), begin)
    grad = _tile(grad_at, head, first, seq_q, g_h, g_s, g_d, BULK, True, DIM, ROWS, DIMS)
    delta = _row_values(rows_at, 2 * head + 1, first, seq_q, padded, BULK, ROWS)
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
    CAUSAL: tl.constexpr, BULK: tl.constexpr, STAGES: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tile, number = _place(tl.cdiv(seq_k, COLS), numbers, section, False)
    start, batch, kv_head = tile * COLS, (number // kv_heads).to(tl.int64), (number % kv_heads).to(tl.int64)
    cols = start + tl.arange(0, COLS)
    q_ptr += batch * q_b + kv_head * group * q_h
    grad_ptr += batch * g_b + kv_head * group * g_h
    q_at = _source(q_ptr, group, seq_q, q_h, q_s, BULK, DIM, ROWS, DIMS)
    grad_at = _source(grad_ptr, group, seq_q, g_h, g_s, BULK, DIM, ROWS, DIMS)
    rows_at = rows_ptr + number.to(tl.int64) * (2 * group * padded)
    if BULK:
        rows_at = tl.make_tensor_descriptor(rows_at, [2 * group, seq_q], [padded, 1], [1, ROWS])
    k_ptr += batch * k_b + kv_head * k_h
    v_ptr += batch * v_b + kv_head * v_h
    k = _tile(k_ptr, 0, start, seq_k, 0, k_s, k_d, False, True, DIM, COLS, DIMS)
    v = _tile(v_ptr, 0, start, seq_k, 0, v_s, v_d, False, True, DIM, COLS, DIMS)
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
                True, BULK, DIM, ROWS, COLS, DIMS,
            )  # fmt: skip
    for step in tl.range(0, group * (tiles - full), num_stages=STAGES):
        dk, dv = _dkv_step(
            k, v, dk, dv, q_at, grad_at, rows_at, step // (tiles - full),
            (full + step % (tiles - full)) * ROWS, cols, q_h, q_s, q_d, g_h, g_s, g_d, seq_q, padded, scale,
            False, BULK, DIM, ROWS, COLS, DIMS,
        )  # fmt: skip
    mask = (cols[:, None] < seq_k) & (tl.arange(0, DIMS)[None, :] < DIM)
    cols, dims = cols.to(tl.int64), tl.arange(0, DIMS)
    dk_at = dk_ptr + batch * dk_b + kv_head * dk_h + cols[:, None] * dk_s + dims[None, :] * dk_d
    dv_at = dv_ptr + batch * dv_b + kv_head * dv_h + cols[:, None] * dv_s + dims[None, :] * dv_d
    tl.store(dk_at, dk * (scale / LOG2_E), mask=mask)
    tl.store(dv_at, dv, mask=mask)


L2_BYTES = 24 * 2**20
"""Of keys and values whose heads are processed together: half of an H100's L2 cache."""


def _constants(kernel: str, q: Tensor, is_causal: bool, read: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Return the constants and the options of a kernel whose loop reads tiles of the tensors ``read``."""
    dim = q.shape[3]
    dims = max(16, power_of_2(dim))
    found = tuned(f"flash_attention.{kernel}", q.device, head_dim=dims, dtype=q.dtype, is_causal=is_causal)
    found["BULK"] = bool(found.get("BULK")) and all(map(_in_bulk, read))
    ahead = found.pop("AHEAD", 0)
    if kernel == "forward":
        found["AHEAD"] = bool(ahead) and found["BULK"] and q.element_size() == 2
    if found["BULK"]:
        triton.set_allocator(_workspace)
    return found | {"CAUSAL": is_causal, "DIM": dim, "DIMS": dims}


def _in_bulk(x: Tensor) -> bool:
    """Return whether the copy engine can read x: contiguous rows, everything else in units of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride and stride % unit == 0 for stride in x.stride()[:3])
    return aligned and x.stride(3) == 1


def _workspace(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the memory in which programs store their descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _section(x: Tensor, heads: int) -> int:
    """Return the number of heads, in multiples of a group, that are processed together."""
    return heads * max(1, L2_BYTES // (2 * x.shape[2] * x.shape[3] * x.element_size()))


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and lse (batch, num_heads, seq) fp32."""
    batch, heads, seq_q, dim = q.shape
    seq_k, group = k.shape[2], heads // k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, seq_q, dtype=torch.float32, device=q.device)
    if seq_k == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tiles = _constants("forward", q, is_causal, (k, v))
    launch(
        _forward_kernel, (cdiv(seq_q, tiles["ROWS"]) * batch * heads,),
        q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(), batch * heads, heads, group,
        seq_q, seq_k, _section(k, group), dim**-0.5 * LOG2_E.value, EVEN=seq_k % tiles["COLS"] == 0, **tiles,
    )  # fmt: skip
    return out, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, rows = query_gradient(grad, q, k, v, out, lse, is_causal)
    return dq, *key_gradients(grad, q, k, v, rows, is_causal)


def query_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q, and the values of each query for ``key_gradients``."""
    batch, heads, seq_q, dim = q.shape
    dq, group = torch.empty_like(q), heads // k.shape[1]
    padded = cdiv(seq_q, 4) * 4  # lines of 16 bytes, which the copy engine requires
    rows = torch.empty(batch * heads, 2, padded, dtype=torch.float32, device=q.device)
    tiles = _constants("dq", q, is_causal, (k, v))
    launch(
        _dq_kernel, (cdiv(seq_q, tiles["ROWS"]) * batch * heads,),
        q, k, v, out, grad, lse.contiguous(), rows, dq, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        *grad.stride(), *dq.stride(), batch * heads, heads, group, seq_q, k.shape[2], padded,
        _section(k, group), dim**-0.5 * LOG2_E.value, EVEN=k.shape[2] % tiles["COLS"] == 0, **tiles,
    )  # fmt: skip
    return dq, rows


def key_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v; ``rows`` are from ``query_gradient``."""
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    dk, dv, group = torch.empty_like(k), torch.empty_like(v), heads // kv_heads
    tiles = _constants("dkv", q, is_causal, (q, grad))
    launch(
        _dkv_kernel, (cdiv(seq_k, tiles["COLS"]) * batch * kv_heads,),
        q, k, v, grad, rows, dk, dv, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *dk.stride(),
        *dv.stride(), batch * kv_heads, kv_heads, group, seq_q, seq_k, rows.shape[2],
        max(1, _section(q, 1) // group), dim**-0.5 * LOG2_E.value, STAGES=tiles.get("num_stages", 1), **tiles,
    )  # fmt: skip
    return dk, dv
