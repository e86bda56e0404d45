"""Kernels of ``dlo_lib.kernels.flash_attention``.

A program of the forward, and of the gradient of q, holds a tile of queries of one head and reads the tiles
of keys. A program of the gradients of k and v holds a tile of keys of one key head and reads the tiles of
queries of all heads that share it, so that no two programs write one element. Only tiles on the diagonal
and at the end of the keys compute a mask. Exponentials have base 2, which is what a GPU computes; lse is
stored with base e.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import launch
from dlo_lib.kernels.triton_code.products import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(
    q,
    keys_ptr,
    rows,
    cols,
    dims,
    k_s,
    k_d,
    seq_k,
    scale,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
):
    """The scores of a tile with base 2, (rows, cols), and its keys, (dims, cols)."""
    k_mask = (dims[:, None] < DIM) & (cols[None, :] < seq_k)
    k = tl.load(keys_ptr + cols[None, :] * k_s + dims[:, None] * k_d, mask=k_mask, other=0.0)
    scores = dot(q, k) * scale
    if MASKED:
        allowed = cols[None, :] < seq_k
        if CAUSAL:
            allowed = allowed & (rows[:, None] >= cols[None, :])
        scores = tl.where(allowed, scores, float("-inf"))
    return scores, k


@triton.jit
def _forward_tile(
    q, acc, largest, total, k_ptr, v_ptr, rows, cols, dims, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    scores, _ = _scores(q, k_ptr, rows, cols, dims, k_s, k_d, seq_k, scale, CAUSAL, MASKED, DIM)
    v_mask = (cols[:, None] < seq_k) & (dims[None, :] < DIM)
    v = tl.load(v_ptr + cols[:, None] * v_s + dims[None, :] * v_d, mask=v_mask, other=0.0)
    new = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(largest - new)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
    return acc, new, total


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    o_b, o_h, o_s, o_d, heads, group, seq_q, seq_k, scale,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    # The grid has one dimension, because the others are limited to 65,535 programs.
    tiles = tl.cdiv(seq_q, ROWS)
    start, number = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles
    batch, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows, dims = start + tl.arange(0, ROWS), tl.arange(0, DIMS)
    mask = (rows[:, None] < seq_q) & (dims[None, :] < DIM)
    q_at = q_ptr + batch * q_b + head * q_h + rows[:, None] * q_s + dims[None, :] * q_d
    q = tl.load(q_at, mask=mask, other=0.0)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    end = tl.minimum(start + ROWS, seq_k) if CAUSAL else seq_k
    unmasked = tl.minimum(start, seq_k) // COLS * COLS if CAUSAL else seq_k // COLS * COLS
    for first in range(0, unmasked, COLS):
        acc, largest, total = _forward_tile(
            q, acc, largest, total, k_ptr, v_ptr, rows, first + tl.arange(0, COLS), dims, k_s, k_d, v_s, v_d,
            seq_k, scale, CAUSAL, False, DIM,
        )  # fmt: skip
    for first in range(unmasked, end, COLS):
        acc, largest, total = _forward_tile(
            q, acc, largest, total, k_ptr, v_ptr, rows, first + tl.arange(0, COLS), dims, k_s, k_d, v_s, v_d,
            seq_k, scale, CAUSAL, True, DIM,
        )  # fmt: skip
    o_at = o_ptr + batch * o_b + head * o_h + rows[:, None] * o_s + dims[None, :] * o_d
    tl.store(o_at, acc / total[:, None], mask=mask)
    lse = (largest + tl.log2(total)) / LOG2_E
    tl.store(lse_ptr + number.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)


@triton.jit
def _dq_tile(
    q, grad, acc, lse, delta, k_ptr, v_ptr, rows, cols, dims, k_s, k_d, v_s, v_d, seq_k, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    scores, k = _scores(q, k_ptr, rows, cols, dims, k_s, k_d, seq_k, scale, CAUSAL, MASKED, DIM)
    v_mask = (dims[:, None] < DIM) & (cols[None, :] < seq_k)
    v = tl.load(v_ptr + cols[None, :] * v_s + dims[:, None] * v_d, mask=v_mask, other=0.0)
    weights = tl.exp2(scores - lse[:, None])
    grad_scores = weights * (dot(grad, v) - delta[:, None])
    return acc + dot(grad_scores.to(k.dtype), tl.trans(k))


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d, g_b, g_h, g_s, g_d,
    dq_b, dq_h, dq_s, dq_d, heads, group, seq_q, seq_k, scale,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(seq_q, ROWS)
    start, number = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles
    batch, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows, dims = start + tl.arange(0, ROWS), tl.arange(0, DIMS)
    mask = (rows[:, None] < seq_q) & (dims[None, :] < DIM)
    q_at = q_ptr + batch * q_b + head * q_h + rows[:, None] * q_s + dims[None, :] * q_d
    o_at = o_ptr + batch * o_b + head * o_h + rows[:, None] * o_s + dims[None, :] * o_d
    g_at = grad_ptr + batch * g_b + head * g_h + rows[:, None] * g_s + dims[None, :] * g_d
    q = tl.load(q_at, mask=mask, other=0.0)
    grad = tl.load(g_at, mask=mask, other=0.0)
    out = tl.load(o_at, mask=mask, other=0.0)
    row_at = number.to(tl.int64) * seq_q + rows
    lse = tl.load(lse_ptr + row_at, mask=rows < seq_q, other=0.0) * LOG2_E
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + row_at, delta, mask=rows < seq_q)  # for the kernel of dk and dv, which runs next
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    end = tl.minimum(start + ROWS, seq_k) if CAUSAL else seq_k
    unmasked = tl.minimum(start, seq_k) // COLS * COLS if CAUSAL else seq_k // COLS * COLS
    for first in range(0, unmasked, COLS):
        acc = _dq_tile(
            q, grad, acc, lse, delta, k_ptr, v_ptr, rows, first + tl.arange(0, COLS), dims, k_s, k_d, v_s,
            v_d, seq_k, scale, CAUSAL, False, DIM,
        )  # fmt: skip
    for first in range(unmasked, end, COLS):
        acc = _dq_tile(
            q, grad, acc, lse, delta, k_ptr, v_ptr, rows, first + tl.arange(0, COLS), dims, k_s, k_d, v_s,
            v_d, seq_k, scale, CAUSAL, True, DIM,
        )  # fmt: skip
    dq_at = dq_ptr + batch * dq_b + head * dq_h + rows[:, None] * dq_s + dims[None, :] * dq_d
    tl.store(dq_at, acc * (scale / LOG2_E), mask=mask)


@triton.jit
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_s, g_d,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d, kv_heads, group, seq_q, seq_k, scale,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(seq_k, COLS)
    start, number = tl.program_id(0) % tiles * COLS, tl.program_id(0) // tiles
    batch, kv_head = (number // kv_heads).to(tl.int64), (number % kv_heads).to(tl.int64)
    cols, dims = start + tl.arange(0, COLS), tl.arange(0, DIMS)
    mask = (cols[:, None] < seq_k) & (dims[None, :] < DIM)
    k_at = k_ptr + batch * k_b + kv_head * k_h + cols[:, None] * k_s + dims[None, :] * k_d
    v_at = v_ptr + batch * v_b + kv_head * v_h + cols[:, None] * v_s + dims[None, :] * v_d
    k = tl.load(k_at, mask=mask, other=0.0)
    v = tl.load(v_at, mask=mask, other=0.0)
    dk = tl.zeros((COLS, DIMS), tl.float32)
    dv = tl.zeros((COLS, DIMS), tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        row_base = (batch * kv_heads * group + head) * seq_q
        for first in range(start // ROWS * ROWS if CAUSAL else 0, seq_q, ROWS):
            rows = first + tl.arange(0, ROWS)
            q_mask = (dims[:, None] < DIM) & (rows[None, :] < seq_q)
            q_at = q_ptr + batch * q_b + head * q_h + rows[None, :] * q_s + dims[:, None] * q_d
            g_at = grad_ptr + batch * g_b + head * g_h + rows[:, None] * g_s + dims[None, :] * g_d
            q = tl.load(q_at, mask=q_mask, other=0.0)  # (dims, rows)
            grad = tl.load(g_at, mask=(rows[:, None] < seq_q) & (dims[None, :] < DIM), other=0.0)
            # A row after the end has lse = inf, so that its weights are 0.
            lse = tl.load(lse_ptr + row_base + rows, mask=rows < seq_q, other=float("inf")) * LOG2_E
            delta = tl.load(delta_ptr + row_base + rows, mask=rows < seq_q, other=0.0)
            weights = tl.exp2(dot(k, q) * scale - lse[None, :])  # (cols, rows)
            if CAUSAL:
                weights = tl.where(rows[None, :] >= cols[:, None], weights, 0.0)
            dv += dot(weights.to(grad.dtype), grad)
            grad_weights = dot(v, tl.trans(grad))
            grad_scores = weights * (grad_weights - delta[None, :])
            dk += dot(grad_scores.to(q.dtype), tl.trans(q))
    dk_at = dk_ptr + batch * dk_b + kv_head * dk_h + cols[:, None] * dk_s + dims[None, :] * dk_d
    dv_at = dv_ptr + batch * dv_b + kv_head * dv_h + cols[:, None] * dv_s + dims[None, :] * dv_d
    tl.store(dk_at, dk * (scale / LOG2_E), mask=mask)
    tl.store(dv_at, dv, mask=mask)


FORWARD_ROWS, DQ_ROWS, DKV_ROWS = 128, 64, 32
"""Queries of a tile in each kernel: with these, no register is spilled in bf16 on sm_80 and sm_90."""


def _tiles(dim: int, dtype: torch.dtype, device: torch.device, rows: int) -> dict[str, int]:
    """Return the sizes of the tiles, and the warps and stages of the pipeline of loads."""
    dims = max(16, triton.next_power_of_2(dim))
    if device.type == "cpu":  # interpreted
        return {"ROWS": 16, "COLS": 16, "DIMS": dims}
    if dtype is torch.float32:
        return {"ROWS": 32, "COLS": 32, "DIMS": dims, "num_warps": 4, "num_stages": 2}
    warps = 8 if dims > 64 or rows == FORWARD_ROWS else 4
    return {"ROWS": rows, "COLS": 64, "DIMS": dims, "num_warps": warps, "num_stages": 2}


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and lse (batch, num_heads, seq) fp32."""
    batch, heads, seq_q, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, seq_q, dtype=torch.float32, device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tiles = _tiles(dim, q.dtype, q.device, FORWARD_ROWS)
    launch(
        _forward_kernel, (triton.cdiv(seq_q, tiles["ROWS"]) * batch * heads,),
        q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(), heads, heads // k.shape[1],
        seq_q, k.shape[2], dim**-0.5 * LOG2_E.value, CAUSAL=is_causal, DIM=dim, **tiles,
    )  # fmt: skip
    return out, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    tiles = _tiles(dim, q.dtype, q.device, DQ_ROWS)
    sizes = (heads // kv_heads, seq_q, seq_k, dim**-0.5 * LOG2_E.value)
    launch(
        _dq_kernel, (triton.cdiv(seq_q, tiles["ROWS"]) * batch * heads,), q, k, v, out, grad, lse, delta, dq,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grad.stride(), *dq.stride(), heads, *sizes,
        CAUSAL=is_causal, DIM=dim, **tiles,
    )  # fmt: skip
    tiles = _tiles(dim, q.dtype, q.device, DKV_ROWS)
    launch(
        _dkv_kernel, (triton.cdiv(seq_k, tiles["COLS"]) * batch * kv_heads,), q, k, v, grad, lse, delta, dk,
        dv, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *dk.stride(), *dv.stride(), kv_heads,
        *sizes, CAUSAL=is_causal, DIM=dim, **tiles,
    )  # fmt: skip
    return dq, dk, dv
