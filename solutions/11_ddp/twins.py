"""The twins: one process with the samples of all ranks; and the buckets that its gradients would fill."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.twins import twin


@twin
def mean_gradients(weights: list[Tensor], inputs: list[Tensor], unused: list[tuple[int, ...]]) -> list[Tensor]:
    """One process with the inputs of all ranks; ``unused`` are the branches that each rank leaves out."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    losses = []
    for x, without in zip(inputs, unused):
        out = sum(torch.tanh(x @ weight).sum(1) for i, weight in enumerate(weights) if i not in without)
        losses.append(out.square().mean())
    return list(torch.autograd.grad(torch.stack(losses).mean(), weights))


@twin
def whole_gradient(weight: Tensor, batches: list[Tensor]) -> Tensor:
    """The gradient of the mean loss over all micro-batches, in one process."""
    weight = weight.clone().requires_grad_()
    loss = torch.stack([torch.tanh(x @ weight.T).square().mean() for x in batches]).mean()
    return torch.autograd.grad(loss, weight)[0]


def buckets_of(weights: list[Tensor], trained: list[int], limit: int) -> list[list[int]]:
    """Which parameters go together."""
    found: list[list[int]] = []
    for i in reversed(trained):
        if found and sum(weights[j].nbytes for j in found[-1]) + weights[i].nbytes <= limit:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def near(got: object, want: Tensor) -> bool:
    """Whether it is a tensor with these values."""
    return type(got) is Tensor and got.shape == want.shape and bool(torch.allclose(got.to(want.dtype), want, rtol=1e-5))
