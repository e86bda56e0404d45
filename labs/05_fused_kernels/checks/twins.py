"""The references of the checks: PyTorch in float64, and the values that known mistakes give."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin


def block_of(size: int) -> int:
    """The smallest power of two that holds a row, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@twin
def softmax(x: Tensor) -> Tensor:
    """The softmax of each row, in the dtype of x."""
    return torch.softmax(x.double(), -1).to(x.dtype)


@twin
def softmax_by_lse(x: Tensor) -> Tensor:
    """The same in fp32 as exp(x - lse)."""
    return torch.exp(x.float() - torch.logsumexp(x.float(), -1, keepdim=True)).to(x.dtype)


@twin
def softmax_with_lanes(x: Tensor) -> Tensor:
    """The same if the lanes after the end of a row count as zeros."""
    lanes = x.new_zeros(len(x), block_of(x.shape[1]) - x.shape[1])
    return torch.softmax(torch.cat([x, lanes], 1).double(), -1)[:, : x.shape[1]].to(x.dtype)


@twin
def rms_norm(x: Tensor, weight: Tensor, eps: float, divisor: int) -> tuple[Tensor, Tensor]:
    """y = x rstd w, and rstd, with the sum of squares divided by ``divisor``."""
    wide = x.double()
    rstd = (wide.square().sum(1) / divisor + eps).rsqrt()
    return (wide * rstd[:, None] * weight.double()).to(x.dtype), rstd.float()


@twin
def rms_norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, by autograd."""
    own, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    y = own * (own.square().mean(1, keepdim=True) + eps).rsqrt() * scale
    dx, dw = torch.autograd.grad(y, (own, scale), grad.double())
    return dx.float(), dw.float()


@twin
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the log-sum-exp of each row, in float32."""
    wide = logits.double()
    lse = torch.logsumexp(wide, 1)
    return (lse - wide.gather(1, targets[:, None])[:, 0]).float(), lse.float()


@twin
def not_rescaled(logits: Tensor, block: int) -> Tensor:
    """The log-sum-exp if the sum of earlier blocks is not rescaled when the maximum grows."""
    total = torch.zeros(len(logits), dtype=torch.float64)
    largest = torch.full((len(logits),), -torch.inf, dtype=torch.float64)
    for part in logits.double().split(block, 1):
        largest = torch.maximum(largest, part.amax(1))
        total += torch.exp(part - largest[:, None]).sum(1)
    return (largest + total.log()).float()


@twin
def cross_entropy_gradient(grad: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the logits, by autograd."""
    own = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(own, targets, reduction="none")
    return torch.autograd.grad(losses, own, grad.double())[0].to(logits.dtype)


@twin
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp with all scores; q (heads, queries, d), k and v (kv_heads, keys, d)."""
    keys, values = (each.double().repeat_interleave(len(q) // len(k), 0) for each in (k, v))
    scores = q.double() @ keys.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse[..., None]).nan_to_num() @ values
    return out.float(), lse.float()


@twin
def attention_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradients of k and v of causal attention, by autograd; every tensor (heads, seq, d)."""
    own = [each.double().requires_grad_() for each in (k, v)]
    scores = q.double() @ own[0].mT * scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    dk, dv = torch.autograd.grad(scores.softmax(-1) @ own[1], own, grad.double())
    return dk.float(), dv.float()
