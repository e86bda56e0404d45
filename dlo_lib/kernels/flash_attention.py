"""FlashAttention: attention by tiles of the scores, which are never stored, forward and backward.

    S = scale q k^T        P = softmax(S)        o = P v        lse = log sum_j exp(S_j)

A tile of queries reads the keys tile after tile. It keeps the maximum m and the sum l of its rows so far, and
rescales the output whenever m grows. The scores of a causal head with 8192 tokens are 128 MiB in bf16; this
function stores lse, 32 KiB. The backward computes P = exp(S - lse) again, tile by tile:
    D = rowsum(do * o)        dS = P (do v^T - D)
    dq = scale dS k           dk = scale dS^T q           dv = P^T do

With grouped queries (GQA), num_heads / num_kv_heads query heads read one key and value head; its gradient
is the sum over them, in one program of the kernel. ``FlashAttention.apply(q, k, v, is_causal)`` saves q, k,
v, o and lse, as in the second assignment of Stanford's CS336; ``flash_attention`` checks its inputs, and
uses PyTorch's fused attention where Triton does not compute, or where cuDNN's kernel is faster.

Papers: FlashAttention (arXiv:2205.14135), FlashAttention-2 (arXiv:2307.08691), GQA (arXiv:2305.13245).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.backends.cuda import cudnn_sdp_enabled
from torch.nn import functional as F

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_version import release
from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for,
    computed_in,
    is_recorded,
    is_requested,
    once_differentiable,
    require_floating,
    run,
)

LARGEST_HEAD = 128
TILE = 128
"""Queries and keys of a tile of the twin."""
_PREFERS_CUDNN = release(torch.__version__) >= (2, 11)  # the oldest release in which this was seen


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v.

    Args:
        q: (batch, num_heads, seq, head_dim), floating-point, with any strides.
        k, v: (batch, num_kv_heads, kv_seq, head_dim) in the dtype of ``q``; num_kv_heads divides num_heads.
        is_causal: query i reads the keys 0 to i.

    Returns:
        (batch, num_heads, seq, head_dim) in the dtype of ``q``.

    Raises:
        UserError: the shapes or dtypes do not fit.
    """
    _require_attention(q, k, v)
    backend = backend_for(q) if q.shape[-1] <= LARGEST_HEAD else KernelBackend.TORCH
    compiling = torch.compiler.is_compiling()
    in_graph = compiling and q.is_cuda  # as an operator, which chooses the backend
    if in_graph or (backend is KernelBackend.TRITON and not _cudnn_is_faster(q)):
        if compiling or is_recorded(q, k, v):
            return apply(FlashAttention, q, k, v, is_causal)
        return run(backend, "flash_attention", attention_forward, q, k, v, is_causal)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def _cudnn_is_faster(q: Tensor) -> bool:
    """Return whether PyTorch's attention computes with cuDNN here, and ``using`` requests no backend.

    PyTorch 2.11 chooses cuDNN for 16-bit tensors on an H200. It took 0.75 to 1.03 times the time of ours in
    the forward, and 0.81 to 0.97 times with the backward; FLASH_ATTENTION took 1.38 to 1.87 times
    (``benchmarks.card_table``, 2048 and 16384 tokens). In fp32 with grouped queries PyTorch stores the
    scores.
    """
    if is_requested() or not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return _PREFERS_CUDNN and _major(q.device) == 9 and cudnn_sdp_enabled()


@cache
def _major(device: torch.device) -> int:
    """Return the first number of the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)[0]


def _require_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    require_floating("q", q)
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4:
        raise _wrong_shapes(q, k, v)
    batch, heads, _, dim = q.shape
    kv_batch, kv_heads, _, kv_dim = k.shape
    if batch != kv_batch or dim != kv_dim:
        raise _wrong_shapes(q, k, v)
    if kv_heads == 0 or heads % kv_heads:
        raise UserError(f"q has {heads} heads: use a multiple of the {kv_heads} heads of k and v")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise UserError("q, k and v have different dtypes or devices: they should have the same")


def _wrong_shapes(*tensors: Tensor) -> UserError:
    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return UserError(
        f"q, k and v have shape {shapes}: they should be (batch, num_heads, seq, head_dim) and twice "
        "(batch, num_kv_heads, kv_seq, head_dim)"
    )


class FlashAttention(Function):
    """The autograd function of attention: ``FlashAttention.apply(q, k, v, is_causal)``.

    Args:
        q: (batch, num_heads, seq, head_dim), or (batch, seq, head_dim) for one head.
        k, v: (batch, num_kv_heads, kv_seq, head_dim), or (batch, kv_seq, head_dim).
        is_causal: query i reads the keys 0 to i.

    The saved tensors are q, k, v, the output and lse, (batch, num_heads, seq) or (batch, seq), fp32 or wider.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        heads: tuple[Tensor, ...] = (q, k, v)
        if q.ndim != 4:
            heads = tuple(tensor.unsqueeze(1) if tensor.ndim == 3 else tensor for tensor in heads)
        _require_attention(*heads)
        ctx.is_causal = is_causal
        ctx.backend = backend_for(q) if q.shape[-1] <= LARGEST_HEAD else KernelBackend.TORCH
        out, lse = run(ctx.backend, "flash_attention", attention_forward, *heads, is_causal)
        if q.ndim == 3:
            out, lse = out.squeeze(1), lse.squeeze(1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        tensors = (grad, *saved)
        one_head = grad.ndim == 3
        if one_head:
            tensors = tuple(tensor.unsqueeze(1) for tensor in tensors)
        dq, dk, dv = run(ctx.backend, "flash_attention", attention_backward, *tensors, ctx.is_causal)
        if one_head:
            dq, dk, dv = (tensor.view(leaf.shape) for tensor, leaf in zip((dq, dk, dv), saved))
        return dq, dk, dv, None


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the output and lse (batch, num_heads, seq) in PyTorch, by tiles."""
    wide = computed_in(q.dtype)
    grouped = _grouped(q, k)  # (batch, num_kv_heads, group, seq, head_dim)
    out, lse = torch.zeros_like(grouped), torch.zeros(grouped.shape[:-1], dtype=wide, device=q.device)
    for queries in _tiles(q.shape[2]):
        tile = grouped[..., queries, :].to(wide)
        largest = torch.full(tile.shape[:-1], -math.inf, dtype=wide, device=q.device)
        total, weighted = torch.zeros_like(largest), torch.zeros_like(tile)
        for keys in _tiles(queries.stop if is_causal else k.shape[2], k.shape[2]):
            scores = _scores(tile, k, queries, keys, is_causal)
            new = torch.maximum(largest, scores.amax(-1))
            weights = torch.exp(scores - new.unsqueeze(-1))
            shrink = torch.exp(largest - new)
            total = total * shrink + weights.sum(-1)
            weighted = weighted * shrink.unsqueeze(-1) + weights @ v[:, :, None, keys].to(wide)
            largest = new
        if k.shape[2]:
            out[..., queries, :] = weighted / total.unsqueeze(-1)
        lse[..., queries] = largest + total.log()
    return out.flatten(1, 2), lse.flatten(1, 2)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in PyTorch, by tiles."""
    wide, scale = lse.dtype, q.shape[-1] ** -0.5
    grouped, grad, lse = _grouped(q, k), _grouped(grad, k).to(wide), _grouped(lse, k)
    delta = (grad * _grouped(out, k)).sum(-1)
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=wide, device=q.device) for tensor in (grouped, k, v))
    for queries in _tiles(q.shape[2]):
        tile, grad_tile = grouped[..., queries, :].to(wide), grad[..., queries, :]
        for keys in _tiles(queries.stop if is_causal else k.shape[2], k.shape[2]):
            scores = _scores(tile, k, queries, keys, is_causal)
            weights = torch.exp(scores - lse[..., queries, None])
            dv[:, :, keys] += (weights.transpose(-1, -2) @ grad_tile).sum(2)
            grad_weights = grad_tile @ v[:, :, None, keys].to(wide).transpose(-1, -2)
            grad_scores = weights * (grad_weights - delta[..., queries, None]) * scale
            dq[..., queries, :] += grad_scores @ k[:, :, None, keys].to(wide)
            dk[:, :, keys] += (grad_scores.transpose(-1, -2) @ tile).sum(2)
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(tile: Tensor, k: Tensor, queries: slice, keys: slice, is_causal: bool) -> Tensor:
    """Return the scores (..., queries, keys) of a tile; -inf where a query does not read a key."""
    scores = tile @ k[:, :, None, keys].to(tile.dtype).transpose(-1, -2) * tile.shape[-1] ** -0.5
    if is_causal and keys.stop > queries.start:
        rows = torch.arange(queries.start, queries.stop, device=tile.device)[:, None]
        scores = scores.masked_fill(rows < torch.arange(keys.start, keys.stop, device=tile.device), -math.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return x (batch, num_heads, ...) as (batch, num_kv_heads, group, ...)."""
    return x.unflatten(1, (k.shape[1], -1))


def _tiles(length: int, available: int | None = None) -> list[slice]:
    end = length if available is None else min(length, available)
    return [slice(start, min(start + TILE, end)) for start in range(0, end, TILE)]
