"""The results that the checks compare with: tables, costs, autograd without checkpoints, one process with
everything."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

Table = list[tuple[str, int]]
Blocks = list[tuple[int, float]]

# -- plans


def ahead_of_time(units: int, reshard: bool = True) -> Table:
    """Return a legal table: each gather starts one computation ahead, every reduction at once."""
    table: Table = [("gather", 0)]
    order = [("forward", k) for k in range(units)] + [("backward", k) for k in reversed(range(units))]
    for (kind, k), following in itertools.zip_longest(order, order[1:]):
        if following is not None and following[1] != k and (reshard or following[0] == "forward"):
            table.append(("gather", following[1]))
        table.append((kind, k))
        if kind == "backward" or (reshard and k != units - 1):
            table.append(("free", k))
        if kind == "backward":
            table.append(("reduce", k))
    return table


# -- costs


@twin
def followed(units: list[int], world: int, keep: int, shards_count: bool = False) -> tuple[float, float]:
    """Return the peak and the sent bytes of a step, action by action; ``shards_count``: as if a shard were
    gathered."""
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
            held[k] = 0.0 if k in over or (keep == world and not shards_count) else units[k] / keep
        peak = max(peak, sum(held))
    return peak, sent


def by_the_clock(units: Blocks, alpha: float, beta: float) -> float:
    """Return the seconds of a forward pass, by a simulation of one link and one processor."""
    arrived, ended = {0: alpha + beta * units[0][0]}, {-1: 0.0}
    for k, (_, seconds) in enumerate(units):
        begins = max(arrived[k], ended[k - 1])
        ended[k] = begins + seconds
        if k + 1 < len(units):
            arrived[k + 1] = max(begins, arrived[k]) + alpha + beta * units[k + 1][0]
    return ended[len(units) - 1]


def all_at_once(units: Blocks, alpha: float, beta: float) -> float:
    """The seconds of a forward pass whose gathers all start at the beginning, one after the other."""
    arrived = ended = 0.0
    for size, seconds in units:
        arrived += alpha + beta * size
        ended = max(arrived, ended) + seconds
    return ended


def joined(blocks: Blocks, counts: list[int]) -> Blocks:
    """Return units with these numbers of blocks."""
    ends = list(itertools.accumulate(counts))
    parts = [blocks[end - count : end] for end, count in zip(ends, counts)]
    return [(sum(size for size, _ in part), sum(seconds for _, seconds in part)) for part in parts]


def too_large(units: Blocks, limit: int) -> bool:
    """Return whether two successive units, or the only one, have more than ``limit`` bytes together."""
    return max(sum(size for size, _ in units[k : k + 2]) for k in range(len(units))) > limit


@twin
def least_time(blocks: Blocks, limit: int, alpha: float, beta: float) -> float:
    """Return the least forward time, by trying every cut."""

    def cuts(left: int) -> list[list[int]]:
        return (
            [[]]
            if left == 0
            else [[first, *rest] for first in range(1, left + 1) for rest in cuts(left - first)]
        )

    units = [joined(blocks, counts) for counts in cuts(len(blocks))]
    return min(by_the_clock(cut, alpha, beta) for cut in units if not too_large(cut, limit))


# -- one process with everything


@twin
def trained_alone(
    weights: list[Tensor], inputs: list[Tensor], grads: list[Tensor], steps: int
) -> list[list[Tensor]]:
    """Return the outputs of each step and rank of ``trained``: gradients are means over ranks, the rate is
    0.1."""
    held, found = [weight.clone().requires_grad_() for weight in weights], []
    for _ in range(steps):
        outputs = []
        for x in inputs:
            for weight in held:
                x = torch.tanh(x @ weight)
            outputs.append(x)
        means = torch.autograd.grad(outputs, held, [grad / len(inputs) for grad in grads])
        found.append([output.detach() for output in outputs])
        held = [(weight - 0.1 * mean).detach().requires_grad_() for weight, mean in zip(held, means)]
    return found


@twin
def without_checkpoints(
    weights: list[Tensor], x: Tensor, grad: Tensor, seed: int, drop: float
) -> dict[str, Tensor | list[Tensor]]:
    """Run the blocks of ``checkpointed`` by plain autograd."""
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
    """Run the blocks of ``deep_forward`` by plain autograd; return a column of output and input gradient."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, width, generator=random) / width**0.5
    x = torch.randn(rows, width, generator=random).requires_grad_()
    y = x
    for _ in range(blocks * depth):
        y = torch.tanh(y @ weight)
    (of_x,) = torch.autograd.grad(y.sum(), x)
    return y.detach()[:, 0].clone(), of_x[:, 0].clone()


@twin
def fp32_steps(
    weights: list[Tensor], steps: list[list[Tensor | None]], dtype: str, lr: float
) -> list[Tensor]:
    """Run AdamW on fp32 copies of rounded weights; return the weights, rounded again."""
    kind = getattr(torch, dtype)
    held = [torch.nn.Parameter(weight.to(kind).float().clone()) for weight in weights]
    optimizer = torch.optim.AdamW(held, lr=lr, weight_decay=0.1)
    for grads in steps:
        for weight, grad in zip(held, grads):
            weight.grad = None if grad is None else grad.to(kind).float()
        optimizer.step()
    return [weight.detach().to(kind) for weight in held]


def through_block(x: Tensor, weight: Tensor, program: list[str]) -> Tensor:
    """Run the operations of a block in turn, of two each: the first with the weight, the second without."""
    for place, name in enumerate(program):
        function = getattr(torch, name)
        x = function(x) if place % 2 else function(x, weight)
    return x
