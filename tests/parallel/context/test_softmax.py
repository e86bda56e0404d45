"""Attention in blocks of keys equals attention to all keys: outputs and gradients, in PyTorch and in the
fused kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlo_lib.parallel.context import kernels
from dlo_lib.parallel.context.softmax import (
    OnlineSoftmax,
    block_attention,
    block_attention_backward,
    merge_block,
)

SCALE = 0.37
FORMS = {
    "in PyTorch": (block_attention, block_attention_backward),
    "by the kernel": (kernels.attend_block, kernels.attend_block_backward),
}
HEADS = [(4, 4), (6, 2), (3, 1)]


@pytest.fixture(params=FORMS, ids=str)
def form(request: pytest.FixtureRequest):
    return FORMS[request.param]


def tensors(heads: int, kv_heads: int, queries: int, keys: int, dtype=torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(heads + keys)
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    return [torch.randn(2, *shape, 7, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def whole_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention by autograd, with each shared head repeated."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * SCALE).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def by_autograd(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, visible: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = whole_attention(*leaves, visible)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def in_blocks(form, q, k, v, grad_out, parts) -> list[Tensor]:
    """``parts``: (rows, columns, causal, bias) of each block."""
    forward, backward = form
    softmax = OnlineSoftmax(q)
    for rows, columns, causal, bias in parts:
        softmax.add(rows, *forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], SCALE, causal, bias))
    grads = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    for rows, columns, causal, bias in parts:
        found = backward(
            grad_out[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            softmax.out[:, :, rows],
            softmax.lse[:, :, rows],
            SCALE,
            causal,
            bias,
        )
        for total, place, grad in zip(grads, (rows, columns, columns), found, strict=True):
            total[:, :, place] += grad
    return [softmax.out, *grads]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_blocks_of_keys_give_full_attention(form, heads, kv_heads):
    q, k, v, grad_out = tensors(heads, kv_heads, 5, 9)
    cuts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    parts = [(slice(0, 5), columns, False, None) for columns in cuts]
    expected = by_autograd(q, k, v, grad_out, torch.ones(5, 9, dtype=torch.bool))
    torch.testing.assert_close(in_blocks(form, q, k, v, grad_out, parts), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_causal_and_full_blocks_give_causal_attention(form, heads, kv_heads):
    q, k, v, grad_out = tensors(heads, kv_heads, 8, 8)
    early, late = slice(0, 3), slice(3, 8)
    parts = [
        (early, early, True, None),
        (late, late, True, None),
        (late, early, False, None),
    ]  # the block (early, late) is not computed
    expected = by_autograd(q, k, v, grad_out, torch.ones(8, 8, dtype=torch.bool).tril())
    torch.testing.assert_close(in_blocks(form, q, k, v, grad_out, parts), expected, rtol=0, atol=1e-12)


def test_a_block_that_some_queries_do_not_see_is_merged(form):
    """In this block, the first sequence sees no key, and the second all of them."""
    q, k, v, grad_out = tensors(4, 2, 6, 6)
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    visible[0, :, :, 3:] = False
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -math.inf)
    rows = slice(0, 6)
    for order in (1, -1):  # the hidden block last, and first
        cuts = [slice(0, 3), slice(3, 6)][::order]
        parts = [(rows, columns, False, bias[..., columns].contiguous()) for columns in cuts]
        expected = by_autograd(q, k, v, grad_out, visible)
        torch.testing.assert_close(in_blocks(form, q, k, v, grad_out, parts), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_and_pytorch_agree(dtype):
    q, k, v, grad_out = tensors(4, 2, 33, 33, dtype)
    within = {torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    out, lse = block_attention(q, k, v, SCALE, causal=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    fused_out, fused_lse = kernels.attend_block(q, k, v, SCALE, causal=True)
    torch.testing.assert_close(fused_out, out, rtol=0, atol=within)
    torch.testing.assert_close(fused_lse, lse, rtol=0, atol=1e-3)
    args = (grad_out, q, k, v, out, lse, SCALE, True)
    for mine, its in zip(kernels.attend_block_backward(*args), block_attention_backward(*args), strict=True):
        assert mine.dtype == its.dtype == dtype
        torch.testing.assert_close(mine, its, rtol=0, atol=within)


def test_a_query_without_a_key_gives_zero_and_minus_infinity(form):
    q, k, v, _ = tensors(2, 2, 3, 4)
    bias = torch.zeros(2, 1, 3, 4, dtype=q.dtype)
    bias[:, :, 1] = -math.inf
    out, lse = form[0](q, k, v, SCALE, False, bias)
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == -math.inf).all()
    assert lse[:, :, [0, 2]].isfinite().all()


def test_a_merge_of_two_empty_blocks_is_empty_and_of_large_scores_finite():
    out, lse = torch.zeros(1, 1, 3, 2), torch.tensor([[[-math.inf, 900.0, -math.inf]]])
    merge_block(
        out,
        lse,
        torch.tensor([[[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]]]),
        torch.tensor([[[-math.inf, 900, 5]]]),
    )
    assert out.tolist() == [[[[0, 0], [0.5, 0.5], [2, 2]]]]
    torch.testing.assert_close(lse, torch.tensor([[[-math.inf, 900 + math.log(2), 5]]]))


def test_the_cpu_uses_the_kernel():
    assert kernels.is_fused(torch.device("cpu"))
    assert not kernels.is_fused(torch.device("meta"))
