"""What the checks compare with: every cut tried, autograd on the whole model, training that remembers all versions of its weights."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.twins import twin

IGNORED = -100
Stages = list[list[tuple[Tensor, Tensor]]]  # for each stage, weight and bias of its layers

# -- cut and loss


def slowest(costs: list[float], starts: list[int]) -> float:
    """The cost of the most costly stage."""
    return max(sum(costs[start:end]) for start, end in zip(starts, [*starts[1:], len(costs)]))


@twin
def least_slowest(costs: list[float], stages: int) -> float:
    """By trying every cut."""
    return min(slowest(costs, [0, *inner]) for inner in itertools.combinations(range(1, len(costs)), stages - 1))


def summed(output: Tensor, target: Tensor) -> float:
    """The cross-entropy of a micro-batch, summed over its valid targets."""
    return float(F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum"))


# -- gradients


@twin
def one_graph(weights: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> dict[str, list[Tensor]]:
    """Outputs, and gradients of inputs and weights, of stages tanh(x W) in one piece."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = list(inputs)
    for weight in weights:
        outputs = [torch.tanh(y @ weight.T) for y in outputs]
    found = list(torch.autograd.grad(outputs, [*inputs, *weights], grads))
    return {"outputs": [output.detach() for output in outputs], "inputs": found[: len(inputs)], "weights": found[len(inputs) :]}


@twin
def whole_step(
    weights: Stages,
    inputs: list[Tensor],
    targets: list[Tensor],
    at: int = 0,
    input_plus: tuple[int, float] | None = None,
    gradient_plus: tuple[int, float] | None = None,
) -> tuple[float, list[list[Tensor]]]:
    """Loss and gradients by stage of the whole model in one process.

    ``input_plus`` adds to one element of what stage ``at`` receives of micro-batch 0, ``gradient_plus`` to the gradient that it receives.
    """
    own = [[(weight.clone().requires_grad_(), bias.clone().requires_grad_()) for weight, bias in stage] for stage in weights]
    total = sum(len(target) for target in targets)
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
def whole_layer(xs: list[Tensor], grads: list[Tensor], weight: Tensor, bias: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """The gradients of the inputs, the weight and the bias of a linear layer, by autograd."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    xs = [x.clone().requires_grad_() for x in xs]
    *inputs, weight_grad, bias_grad = torch.autograd.grad([F.linear(x, weight, bias) for x in xs], [*xs, weight, bias], grads)
    return inputs, weight_grad, bias_grad


# -- delayed gradients


@twin
def delayed_twin(weights: list[Tensor], goals: list[Tensor], lr: float, delays: list[int], steps: int) -> list[Tensor]:
    """w_s(t+1) = w_s(t) - lr * gradient_s at the versions max(0, t - delay_r) of each stage r, all versions of all stages remembered."""
    versions = [[weight] for weight in weights]
    for now in range(steps):
        used = [stage[now - delay] if now > delay else stage[0] for stage, delay in zip(versions, delays)]
        total = sum(weight.sum() for weight in used)
        for stage, weight in zip(versions, used):
            stage.append(stage[-1] - lr * (weight - goals[now] + 0.1 * total))
    return [stage[-1] for stage in versions]


@twin
def asynchronous_twin(weights: Stages, inputs: list[Tensor], targets: list[Tensor], lr: float, delays: list[int]) -> list[list[Tensor]]:
    """Training in one process, batch after batch, whose stage s reads weights that are ``delays[s]`` updates old."""
    versions = [[[tensor for pair in stage for tensor in pair]] for stage in weights]
    for now, (x, target) in enumerate(zip(inputs, targets)):
        used = [[tensor.clone().requires_grad_() for tensor in stage[max(0, now - delay)]] for stage, delay in zip(versions, delays)]
        for tensors in used:
            for weight, bias in zip(tensors[::2], tensors[1::2]):
                x = torch.tanh(x @ weight.T + bias)
        found = iter(torch.autograd.grad(F.cross_entropy(x, target), [tensor for tensors in used for tensor in tensors]))
        for stage in versions:
            stage.append([tensor - lr * next(found) for tensor in stage[-1]])
    return [stage[-1] for stage in versions]


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    """Whether these are the same tensors, but for rounding: to tell a mistake by its name."""
    pairs = list(zip(got, want))
    alike = all(type(mine) is Tensor and mine.shape == right.shape and mine.dtype == right.dtype for mine, right in pairs)
    return alike and all(bool(torch.allclose(mine, right, rtol=1e-9, atol=1e-10)) for mine, right in pairs)
