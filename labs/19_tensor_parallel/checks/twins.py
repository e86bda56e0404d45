"""The references of the checks: one process with the whole tensors, and ``narrow`` for a rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.twins import twin
from dlo_lib.models.llama import Llama, LlamaConfig, apply_rope

Found = tuple[Tensor, list[Tensor]]  # the result, and the gradients of the arguments


def part(tensor: Tensor, dim: int | None, rank: int, world: int) -> Tensor:
    """The part of a rank along ``dim``; all of it for None."""
    if dim is None:
        return tensor.clone()
    size = tensor.shape[dim] // world
    return tensor.narrow(dim, rank * size, size).clone()


def _found(out: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> Found:
    return out.detach(), list(torch.autograd.grad(out, inputs, grad))


def _trained(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@twin
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> Found:
    """x Wᵀ + b, and the gradients."""
    own = _trained(x, weight, *([] if bias is None else [bias]))
    return _found(own[0] @ own[1].T + (own[2] if bias is not None else 0), own, grad)


@twin
def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, grad: Tensor) -> Found:
    """down(silu(gate(x)) · up(x)), and the gradients."""
    own = _trained(x, gate, up, down)
    first = own[0] @ own[1].T
    return _found((first * torch.sigmoid(first) * (own[0] @ own[2].T)) @ own[3].T, own, grad)


@twin
def embedding(tokens: Tensor, weight: Tensor, grad: Tensor) -> Found:
    """The rows of the tokens, by a product with one-hot vectors, and the gradient of the table."""
    own = _trained(weight)
    return _found(F.one_hot(tokens, len(weight)).to(weight.dtype) @ own[0], own, grad)


@twin
def attention(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, cos: Tensor, sin: Tensor, grad: Tensor
) -> Found:
    """Causal grouped-query attention with an explicit softmax, and the gradients of x and the weights."""
    own = _trained(x, q, k, v, o)
    heads = [(own[0] @ weight.T).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for weight in own[1:4]]
    each = heads[0].shape[1] // heads[1].shape[1]
    queries, keys = apply_rope(heads[0], cos, sin), apply_rope(heads[1], cos, sin).repeat_interleave(each, 1)
    scores = queries @ keys.transpose(-1, -2) / cos.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ heads[2].repeat_interleave(each, 1)
    return _found(out.transpose(1, 2).flatten(2) @ own[4].T, own, grad)


@twin
def cross_entropy(logits: Tensor, targets: Tensor) -> Found:
    """The mean loss, and the gradient of the logits."""
    own = _trained(logits)
    loss = F.cross_entropy(own[0].flatten(0, -2), targets.flatten())
    return _found(loss, own, torch.ones_like(loss))


@twin
def norm_mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, grad: Tensor) -> Found:
    """An MLP behind RMSNorm, and the gradients."""
    own = _trained(x, norm, gate, up, down)
    normed = own[0] * (own[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * own[1]
    first = normed @ own[2].T
    return _found((first * torch.sigmoid(first) * (normed @ own[3].T)) @ own[4].T, own, grad)


@twin
def llama_step(
    sizes: Mapping[str, Any], state: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """The loss of one process, and the gradients by name."""
    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return float(loss.detach()), {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
