"""The references of the checks: one process with the whole sequence, and an explicit softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.twins import twin
from dlo_lib.models.llama import Llama, LlamaConfig

Block = tuple[Tensor, Tensor]
"""The output of attention to some keys, and the log-sum-exp of their scores."""


def _scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.einsum("bhqd,bhkd->bhqk", q, k).div(q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)


@twin
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Block:
    """Attention to the keys that the mask (queries, keys) shows; a row without a key is 0, with -inf."""
    scores = _scores(q, k, mask)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


@twin
def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
    """The gradients of q, k and v, by autograd; each query sees a key."""
    own = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    out = _scores(own[0], own[1], mask).softmax(-1) @ own[2]
    return list(torch.autograd.grad(out, own, grad))


def block_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor) -> list[Tensor]:
    """What a block contributes to dq, dk and dv, with ``out`` and ``lse`` of the whole rows; by autograd."""
    whole = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    scores = torch.einsum("bhqd,bhkd->bhqk", *whole[:2]) / q.shape[-1] ** 0.5
    shares = (scores - lse.unsqueeze(-1)).exp() * mask
    inner = torch.einsum("bhqd,bhkd->bhqk", grad, v) - (grad * out).sum(-1, keepdim=True)
    total = (shares * inner).sum() + ((shares.detach() @ whole[2]) * grad).sum()
    return list(torch.autograd.grad(total, whole))


def causal(positions: Tensor, others: Tensor) -> Tensor:
    """The mask of queries at ``positions`` and keys at ``others``."""
    return positions[:, None] >= others


def own(tensor: Tensor, positions: Tensor) -> Tensor:
    """The tokens at ``positions`` of (batch, heads, seq, ...)."""
    return tensor.index_select(2, positions)


@twin
def context_loss(logits: Tensor, targets: Tensor) -> Block:
    """The mean loss over the tokens with a target, and the gradient of the logits (batch, seq, vocabulary)."""
    whole = logits.detach().clone().requires_grad_()
    valid = targets != -100
    losses = -whole.log_softmax(-1).gather(-1, targets.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    loss = (losses * valid).sum() / valid.sum()
    return loss.detach(), torch.autograd.grad(loss, whole)[0]


@twin
def llama_step(
    sizes: Mapping[str, Any], state: Mapping[str, Tensor], tokens: Tensor, padding: int
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The loss of one process for tokens (batch, seq + 1), the logits, and the gradients by name."""
    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    targets, logits = tokens[:, 1:], model(tokens[:, :-1])
    valid = targets != padding
    loss = F.cross_entropy(logits[valid], targets[valid])
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(loss.detach()), logits.detach(), grads
