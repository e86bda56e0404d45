"""The results that the checks compare with: the best cut, autograd on the whole model, delayed
training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.functional import vjp

from dlo_lib.grading.checks.twins import twin

IGNORED = -100
Stages = list[list[tuple[Tensor, Tensor]]]  # for each stage, weight and bias of its layers

# -- cut and loss


def slowest(costs: list[float], starts: list[int]) -> float:
    """Return the cost of the most costly stage."""
    return max(sum(costs[start:end]) for start, end in zip(starts, [*starts[1:], len(costs)]))


def summed(output: Tensor, target: Tensor) -> float:
    """Return the cross-entropy of a micro-batch, summed over its valid targets."""
    return float(F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum"))


@twin
def least_by_bisection(costs: list[float], stages: int) -> float:
    """Return the least limit within which stages can be filled one after the other, by bisection."""
    low, high = max(costs), sum(costs)
    for _ in range(60):
        limit = (low + high) / 2
        used, held = 1, 0.0
        for cost in costs:
            used, held = (used, held + cost) if held + cost <= limit else (used + 1, cost)
        low, high = (low, limit) if used <= stages else (limit, high)
    return high


# -- gradients


@twin
def whole_ends(table: Tensor, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the rows of ``table`` at ``ids``, and the gradient of the table."""
    return vjp(lambda own: F.cross_entropy(torch.tanh(own[ids]), targets), table)


@twin
def one_graph(weights: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> dict[str, list[Tensor]]:
    """Return outputs, and gradients of inputs and weights, of stages tanh(x Wᵀ) in one graph."""

    def through(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = leaves[len(weights) :]
        for weight in leaves[: len(weights)]:
            outputs = tuple(torch.tanh(y @ weight.T) for y in outputs)
        return outputs

    outputs, found = vjp(through, (*weights, *inputs), tuple(grads))
    return {"outputs": [*outputs], "inputs": [*found[len(weights) :]], "weights": [*found[: len(weights)]]}


@twin
def whole_step(
    weights: Stages,
    inputs: list[Tensor],
    targets: list[Tensor],
    at: int = 0,
    input_plus: tuple[int, float] | None = None,
    gradient_plus: tuple[int, float] | None = None,
) -> tuple[float, list[list[Tensor]]]:
    """Return loss and gradients by stage of the whole model in one process.

    ``input_plus`` adds to one element of the input of stage ``at`` in micro-batch 0, ``gradient_plus`` to one
    of the gradient that the stage receives.
    """
    own = [
        [(weight.clone().requires_grad_(), bias.clone().requires_grad_()) for weight, bias in stage]
        for stage in weights
    ]
    total = sum(int((target != IGNORED).sum()) for target in targets)
    loss = torch.zeros((), dtype=inputs[0].dtype)
    for i, (x, target) in enumerate(zip(inputs, targets)):
        for number, stage in enumerate(own):
            if number == at and i == 0 and input_plus is not None:
                x = x + _one(x, *input_plus)
            for weight, bias in stage:
                x = torch.tanh(x @ weight.T + bias)
            if number == at and i == 0 and gradient_plus is not None:
                x.register_hook(lambda grad: grad + _one(grad, *gradient_plus))
        loss = loss + F.cross_entropy(x, target, reduction="sum") / total
    found = iter(torch.autograd.grad(loss, [tensor for stage in own for pair in stage for tensor in pair]))
    return float(loss.detach()), [[next(found) for _ in range(2 * len(stage))] for stage in own]


def _one(like: Tensor, element: int, by: float) -> Tensor:
    plus = torch.zeros_like(like)
    plus.view(-1)[element] = by
    return plus


@twin
def whole_layer(
    xs: list[Tensor], grads: list[Tensor], weight: Tensor, bias: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the gradients of the inputs, the weight and the bias of a linear layer, by autograd."""

    def layer(weight: Tensor, bias: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight, bias) for x in xs)

    _, (of_weight, of_bias, *inputs) = vjp(layer, (weight, bias, *xs), tuple(grads))
    return inputs, of_weight, of_bias


# -- delayed gradients


@twin
def delayed_twin(
    weights: list[Tensor],
    goals: list[Tensor],
    lr: float,
    delays: list[int],
    steps: int,
    from_old: bool = False,
) -> list[Tensor]:
    """Compute w_s(t+1) = w_s(t) - lr * gradient_s at the versions max(0, t - delay_r) of each stage r.

    With ``from_old``, a mistake, the step starts from the version of the gradient.
    """
    versions = [[weight] for weight in weights]
    for now in range(steps):
        used = [stage[now - delay] if now > delay else stage[0] for stage, delay in zip(versions, delays)]
        total = sum(weight.sum() for weight in used)
        for stage, weight in zip(versions, used):
            stage.append((weight if from_old else stage[-1]) - lr * (weight - goals[now] + 0.1 * total))
    return [stage[-1] for stage in versions]


@twin
def asynchronous_twin(
    weights: Stages, inputs: list[Tensor], targets: list[Tensor], lr: float, delays: list[int]
) -> list[list[Tensor]]:
    """Train in one process, batch after batch; stage s reads weights that are ``delays[s]`` updates old."""
    versions = [[[tensor for pair in stage for tensor in pair]] for stage in weights]
    for now, (x, target) in enumerate(zip(inputs, targets)):
        used = [
            [tensor.clone().requires_grad_() for tensor in stage[max(0, now - delay)]]
            for stage, delay in zip(versions, delays)
        ]
        for tensors in used:
            for weight, bias in zip(tensors[::2], tensors[1::2]):
                x = torch.tanh(x @ weight.T + bias)
        leaves = [tensor for tensors in used for tensor in tensors]
        found = iter(torch.autograd.grad(F.cross_entropy(x, target), leaves))
        for stage in versions:
            stage.append([tensor - lr * next(found) for tensor in stage[-1]])
    return [stage[-1] for stage in versions]
