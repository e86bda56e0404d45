"""What the checks compare with: tables followed action by action, every cut tried, autograd without checkpoints, one process with everything."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.twins import twin

Table = list[tuple[str, int]]
Blocks = list[tuple[int, float]]

# -- plans


def ahead_of_time(units: int) -> Table:
    """A legal table of the judge's own: each unit asked for one computation ahead, every reduction at once."""
    table: Table = [("gather", 0)]
    order = [("forward", k) for k in range(units)] + [("backward", k) for k in reversed(range(units))]
    for (kind, k), following in itertools.zip_longest(order, order[1:]):
        if following is not None and following[1] != k:
            table.append(("gather", following[1]))
        table.append((kind, k))
        if kind == "backward" or k != units - 1:
            table.append(("free", k))
        if kind == "backward":
            table.append(("reduce", k))
    return table


def just_in_time(units: int) -> Table:
    """The same collectives in the same order, each one as late as can be: a unit is asked for when it is needed, reduced one unit later."""
    table: Table = [("gather", 0)]
    for k in range(units):
        table += [("gather", k)] if k > 0 else []
        table += [("forward", k)] + ([("free", k)] if k < units - 1 else [])
    for k in reversed(range(units)):
        table += [("gather", k)] if k < units - 1 else []
        table += [("backward", k), ("free", k)]
        table += [("reduce", k + 1)] if k < units - 1 else []
    return [*table, ("reduce", 0)]


def whole_between(units: int) -> Table:
    """Without resharding after forward, and everything asked for at the beginning: slow to start, and legal."""
    table: Table = [("gather", k) for k in range(units)] + [("forward", k) for k in range(units)]
    for k in reversed(range(units)):
        table += [("backward", k), ("reduce", k), ("free", k)]
    return table


# -- costs


@twin
def followed(units: list[int], world: int, keep: int) -> tuple[float, float]:
    """Peak and sent bytes of a step, action by action."""
    held, gathered, over = [0.0] * len(units), set(), set()
    sent, peak = 0.0, 0.0
    for kind, k in ahead_of_time(len(units)):
        if kind == "gather":
            ranks = keep if k in gathered else world
            sent += units[k] * (ranks - 1) / ranks
            held[k] = float(units[k])
            gathered.add(k)
        elif kind == "backward":
            over.add(k)
        elif kind == "free":
            held[k] = 0.0 if k in over or keep == world else units[k] / keep
        peak = max(peak, sum(held))
    return peak, sent


def by_the_clock(units: Blocks, alpha: float, beta: float) -> float:
    """Seconds of a forward pass: one link and one processor, each event after those it needs."""
    arrived, ended = {0: alpha + beta * units[0][0]}, {-1: 0.0}
    for k, (_, seconds) in enumerate(units):
        begins = max(arrived[k], ended[k - 1])
        ended[k] = begins + seconds
        if k + 1 < len(units):
            arrived[k + 1] = max(begins, arrived[k]) + alpha + beta * units[k + 1][0]
    return ended[len(units) - 1]


def joined(blocks: Blocks, counts: list[int]) -> Blocks:
    """Units of so many blocks each."""
    ends = list(itertools.accumulate(counts))
    parts = [blocks[end - count : end] for end, count in zip(ends, counts)]
    return [(sum(size for size, _ in part), sum(seconds for _, seconds in part)) for part in parts]


def too_large(units: Blocks, limit: int) -> bool:
    """Whether two units that follow each other, or the only one, have more than ``limit`` bytes together."""
    return max(sum(size for size, _ in units[k : k + 2]) for k in range(len(units))) > limit


@twin
def least_time(blocks: Blocks, limit: int, alpha: float, beta: float) -> float:
    """By trying every cut."""

    def cuts(left: int) -> list[list[int]]:
        return [[]] if left == 0 else [[first, *rest] for first in range(1, left + 1) for rest in cuts(left - first)]

    units = [joined(blocks, counts) for counts in cuts(len(blocks))]
    return min(by_the_clock(cut, alpha, beta) for cut in units if not too_large(cut, limit))


# -- one process with everything


@twin
def stacked(weights: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of each rank's input through tanh(x W), and the mean over ranks of the gradients of the weights."""
    held = [weight.clone().requires_grad_() for weight in weights]
    outputs = []
    for x in inputs:
        for weight in held:
            x = torch.tanh(x @ weight)
        outputs.append(x)
    found = torch.autograd.grad(outputs, held, [grad / len(inputs) for grad in grads])
    return [output.detach() for output in outputs], list(found)


@twin
def large_stack(seed: int, units: int, width: int) -> tuple[Tensor, list[float]]:
    """Output, and the sum of each weight's gradient; all ranks have the same input."""
    random = torch.Generator().manual_seed(seed)
    weights = [(torch.randn(width * width, generator=random) / width**0.5).requires_grad_() for _ in range(units)]
    x, grad = torch.randn(2, width, generator=random), torch.randn(2, width, generator=random)
    for weight in weights:
        x = torch.tanh(x @ weight.view(width, width))
    x.backward(grad)
    return x.detach(), [float(weight.grad.double().sum()) for weight in weights if weight.grad is not None]


@twin
def without_checkpoints(weights: list[Tensor], x: Tensor, grad: Tensor, seed: int, drop: float) -> dict[str, Tensor | list[Tensor]]:
    """The blocks of ``scenarios.checkpointed``, by plain autograd."""
    held, x = [weight.clone().requires_grad_() for weight in weights], x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = x
    for weight in held:
        y = torch.tanh(torch.nn.functional.dropout(y @ weight, drop) @ weight.T)
    random = torch.rand(6)
    of_x, *of_weights = torch.autograd.grad(y, [x, *held], grad)
    return {"output": y.detach(), "x": of_x, "weights": of_weights, "random": random}


@twin
def deep_stack(seed: int, blocks: int, rows: int, width: int, depth: int) -> tuple[Tensor, Tensor]:
    """The blocks of ``scenarios.deep_forward``, by plain autograd: a column of the output, and of the input's gradient."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, width, generator=random) / width**0.5
    x = torch.randn(rows, width, generator=random).requires_grad_()
    y = x
    for _ in range(blocks * depth):
        y = torch.tanh(y @ weight)
    (of_x,) = torch.autograd.grad(y.sum(), x)
    return y.detach()[:, 0].clone(), of_x[:, 0].clone()


@twin
def fp32_steps(weights: list[Tensor], steps: list[list[Tensor | None]], dtype: str, lr: float) -> list[Tensor]:
    """AdamW on fp32 weights that begin as rounded ones, rounded again at the end."""
    kind = getattr(torch, dtype)
    held = [torch.nn.Parameter(weight.to(kind).float().clone()) for weight in weights]
    optimizer = torch.optim.AdamW(held, lr=lr, weight_decay=0.1)
    for grads in steps:
        for weight, grad in zip(held, grads):
            weight.grad = None if grad is None else grad.to(kind).float()
        optimizer.step()
    return [weight.detach().to(kind) for weight in held]


def through_blocks(shards: list[Tensor], depths: list[int], x: Tensor, amount: float) -> Tensor:
    """Blocks of ``scenarios.compiled_blocks``, each one graph of two operations a layer, with nothing of its hooks in it."""
    for shard, depth in zip(shards, depths):
        for _ in range(depth):
            x = torch.tanh(x * (2 * shard))
        x = x + 2 * depth * amount
    return x


def rates(points: list[tuple[int, float, float]], limit: float) -> list[tuple[int, float]]:
    """Every batch that fits, from the first point on, with its sequences a second: memory and seconds, one sequence after the other."""
    found: list[tuple[int, float]] = []
    (batch, memory, seconds), rest = points[0], list(points[1:])
    lower = points[0]
    while memory <= limit:
        found.append((batch, batch / seconds))
        if len(rest) > 1 and batch == rest[0][0]:
            lower = rest.pop(0)
        batch += 1
        part = (batch - lower[0]) / (rest[0][0] - lower[0])
        memory = (1 - part) * lower[1] + part * rest[0][1]
        seconds = (1 - part) * lower[2] + part * rest[0][2]
    return found
