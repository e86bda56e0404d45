"""The twin of each step: it computes the same numbers differently, with branches, loops and plain Python
where they are clearest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

Operation = tuple[str, list[str]]


def drawn_operations(t, most: int = 7) -> tuple[list[Operation], dict[str, int], list[str]]:
    """A chain with side branches: operations, elements of each tensor, and the results to write. Every input
    is used, one twice."""
    rows, width = t.integer(3, 40), t.integer(3, 40)
    inputs = {"x": rows * width, "bias": width, "y": rows * width}
    operations: list[Operation] = []
    names = list(inputs)
    for number in range(t.integer(4, most)):
        first = names[-1] if number else "x"
        second = ("bias", "y")[number] if number < 2 else t.choice([name for name in names if name != first])
        operations.append((f"r{number}", [first, second]))
        names.append(f"r{number}")
    operations.append(("last", [names[-1], "x"]))  # an input that two operations use
    sizes = inputs | {result: rows * width for result, _ in operations}
    outputs = sorted({operations[-1][0], t.choice(operations)[0]})
    return operations, sizes, outputs


def bytes_one_by_one(operations: Sequence[Operation], sizes: Mapping[str, int], itemsize: int) -> int:
    """The bytes of separate operations."""
    total = 0
    for result, operands in operations:
        for name in {result} | set(operands):
            total += itemsize * sizes[name]
    return total


def bytes_at_once(
    operations: Sequence[Operation], sizes: Mapping[str, int], outputs: Sequence[str], itemsize: int
) -> int:
    """The bytes of one kernel for all operations."""
    made = {result for result, _ in operations}
    needed = set().union(*(operands for _, operands in operations)) - made
    return itemsize * sum(sizes[name] for name in needed | set(outputs))


def clipped(gradient: Tensor, limit: Tensor) -> Tensor:
    norm = float(gradient.double().square().sum().sqrt())
    if norm > float(limit):
        return (gradient.double() * (float(limit) / norm)).to(gradient.dtype)
    return gradient.clone()


def mean_of(losses: Tensor, mask: Tensor) -> Tensor:
    kept = [float(loss) for loss, is_kept in zip(losses.flatten(), mask.flatten()) if is_kept]
    return torch.tensor(sum(kept) / len(kept) if kept else 0.0)


def routed(tokens: Tensor, experts: Tensor, choice: Tensor) -> Tensor:
    return torch.stack([token @ experts[int(expert)] for token, expert in zip(tokens, choice)])


def block(x: Tensor, weight: Tensor, index: int) -> Tensor:
    return x + torch.tanh(x @ weight) / (1 + index)


def pooled(x: Tensor) -> Tensor:
    return x.flatten(0, 1).cumsum(0).view(x.shape).mean(1)


def after_adamw(
    parameter: Tensor, gradients: Sequence[Tensor], rates: Sequence[float], settings: Mapping[str, float]
) -> Tensor:
    """The parameter after one step of torch's AdamW per gradient."""
    weight = torch.nn.Parameter(parameter.clone())
    options = {"eps": settings["eps"], "weight_decay": settings["decay"], "foreach": False}
    optimizer = torch.optim.AdamW([weight], betas=(settings["beta1"], settings["beta2"]), **options)
    for gradient, rate in zip(gradients, rates):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def cost(
    buckets: Sequence[int], counts: Mapping[int, int], compile_seconds: float, token_seconds: float
) -> float:
    """Seconds of compiling and of computing; infinite if a length fits into no bucket."""
    total = compile_seconds * len(buckets)
    for length, number in counts.items():
        fitting = [bucket for bucket in buckets if bucket >= length]
        total += number * token_seconds * min(fitting) if fitting else float("inf")
    return total


@twin
def cheapest_of_all(counts: dict[int, int], compile_seconds: float, token_seconds: float) -> float:
    """The least cost over all choices, for few lengths."""
    *others, longest = sorted(counts)
    numbers = range(len(others) + 1)
    choices = itertools.chain(*(itertools.combinations(others, number) for number in numbers))
    return min(cost((*chosen, longest), counts, compile_seconds, token_seconds) for chosen in choices)


def added_one_by_one(counts: Mapping[int, int], compile_seconds: float, token_seconds: float) -> float:
    """The cost when the bucket that saves most is added again and again, which is often not the least."""
    buckets = [max(counts)]
    while True:
        found = cost(buckets, counts, compile_seconds, token_seconds)
        rest = [length for length in counts if length not in buckets]
        ways = [(cost([*buckets, length], counts, compile_seconds, token_seconds), length) for length in rest]
        if not ways or min(ways)[0] >= found:
            return found
        buckets.append(min(ways)[1])


def removed_one_by_one(counts: Mapping[int, int], compile_seconds: float, token_seconds: float) -> float:
    """The cost when every length has a bucket first, and the bucket that saves least is removed again and
    again."""
    buckets = sorted(counts)
    while True:
        found = cost(buckets, counts, compile_seconds, token_seconds)
        fewer = [[other for other in buckets if other != each] for each in buckets[:-1]]
        ways = [(cost(rest, counts, compile_seconds, token_seconds), rest) for rest in fewer]
        if not ways or min(ways)[0] >= found:
            return found
        buckets = min(ways)[1]


@twin
def cheapest(counts: dict[int, int], compile_seconds: float, token_seconds: float) -> float:
    """The least cost for many lengths: a shortest path over the sorted lengths, whose edges are buckets."""
    lengths = sorted(counts)
    best = [0.0]
    for last, bucket in enumerate(lengths):
        ways, inside = [], 0
        for first in range(last, -1, -1):
            inside += counts[lengths[first]]
            ways.append(best[first] + compile_seconds + token_seconds * bucket * inside)
        best.append(min(ways))
    return best[-1]
