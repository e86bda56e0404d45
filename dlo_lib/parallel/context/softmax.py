"""Attention in blocks of keys, written out in PyTorch: the merge of two blocks, and the gradients of one.

A block of keys gives the output of attention over these keys alone and the logarithm of the sum of the
exponentials of its scores (log-sum-exp, LSE). With S = scale * Q K^T:

    lse_b = log sum_k exp(S_bk)            out_b = exp(S_b - lse_b) V_b
    lse   = log(exp(lse_1) + exp(lse_2))   out   = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The merge is exact, and its exponents are at most 0, so that it does not overflow. The backward needs no
block but the saved LSE of the whole row: P_b = exp(S_b - lse) are the probabilities of the whole softmax.

    D = sum(dOut * Out)    dS_b = P_b * (dOut V_b^T - D)
    dQ += scale * dS_b K_b    dK_b = scale * dS_b^T Q    dV_b = P_b^T dOut

Query heads share key and value heads as in grouped-query attention (GQA): head h uses h // (heads / kv
heads). Memory of one block: its scores, (batch, heads, queries, keys). The fused kernel (``kernels``) does
not store them and returns the same results.

Papers: M. Milakov, N. Gimelshein, Online normalizer calculation for softmax (arXiv:1805.02867);
T. Dao et al., FlashAttention (arXiv:2205.14135)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks: fp32 for bf16 and fp16, otherwise ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention over one block of keys.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, kv_heads, keys, head_dim).
        scale: the factor of the scores.
        causal: whether query i sees the keys 0 ... i of the block only.
        bias: is added to the scores, and broadcasts to (batch, heads, queries, keys); -inf hides a key.

    Returns the output (batch, heads, queries, head_dim) in the dtype of ``q``, and the LSE (batch, heads,
    queries) in fp32 or wider. A query that sees no key has the output 0 and the LSE -inf.
    """
    wide = accumulation_dtype(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), scale, causal, bias)  # (batch, kv_heads, group, queries, keys)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))
    out = weights @ v.to(wide).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of one block of keys to the gradients.

    Args:
        grad_out: the gradient of the output over all keys, (batch, heads, queries, head_dim).
        q, k, v, scale, causal, bias: the arguments of ``block_attention``.
        out, lse: the output and the LSE of the queries over *all* keys. The LSE is finite.

    Returns dq, of which the gradient is the sum over the blocks, and dk and dv of this block.
    """
    wide = accumulation_dtype(q.dtype)
    kv_heads = k.shape[1]
    wide_q, wide_k, wide_v = (tensor.to(wide) for tensor in (q, k, v))
    scores = _scores(wide_q, wide_k, scale, causal, bias)
    probabilities = torch.exp(scores - _grouped(lse.unsqueeze(-1), kv_heads))
    grouped_grad, grouped_q = _grouped(grad_out.to(wide), kv_heads), _grouped(wide_q, kv_heads)
    row_sums = (grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)  # D of the module docstring
    grad_weights = grouped_grad @ wide_v.unsqueeze(2).mT
    grad_scores = probabilities * (grad_weights - _grouped(row_sums, kv_heads)) * scale
    dq = (grad_scores @ wide_k.unsqueeze(2)).flatten(1, 2)
    # The query heads of a group add to the gradient of the same key and value head.
    dk = (grad_scores.mT @ grouped_q).sum(2)
    dv = (probabilities.mT @ grouped_grad).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """View (batch, heads, ...) as (batch, kv_heads, group, ...)."""
    return tensor.unflatten(1, (kv_heads, -1))


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, bias: Tensor | None) -> Tensor:
    scores = _grouped(q, k.shape[1]) @ k.unsqueeze(2).mT * scale
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if bias is not None:
        whole = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        scores = scores + _grouped(whole, k.shape[1])
    return scores


class OnlineSoftmax:
    """The merged output of the blocks that were added so far, for all queries of a rank.

    Args:
        q: the queries (batch, heads, queries, head_dim), of which the sums take shape and device.

    Attributes:
        out: (batch, heads, queries, head_dim) in ``accumulation_dtype``.
        lse: (batch, heads, queries).
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a block of keys for the queries ``rows``. ``out`` and ``lse`` may be changed.

        The first block of all queries is kept as the sum, without a copy unless the dtype changes.
        """
        if self.out is None or self.lse is None:
            if out.shape == self._q.shape:
                self.out, self.lse = out.to(accumulation_dtype(out.dtype)), lse
                return
            self.out = torch.zeros_like(self._q, dtype=accumulation_dtype(out.dtype))
            self.lse = lse.new_full(self._q.shape[:-1], -math.inf)
        merge_block(self.out[:, :, rows], self.lse[:, :, rows], out, lse)


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the result of one block of keys into ``out`` and ``lse``, in place.

    Args:
        out, block_out: (batch, heads, queries, head_dim).
        lse, block_lse: (batch, heads, queries); -inf for queries that saw no key.
    """
    # The share of the block in the softmax of the row, exp(block_lse - merged). The difference of two large
    # numbers is more accurate than their distance to the rounded sum. It is not a number without a key.
    share = torch.sigmoid(block_lse - lse).nan_to_num_(0)
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, block_lse, out=lse)
