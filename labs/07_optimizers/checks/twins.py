"""The references of the checks, in float64 and by another form than the exercises: averages as weighted sums
over all gradients, decays as powers, polynomials of matrices through their singular values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

Options = Mapping[str, Any]
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def sum_of(gradients: Sequence[Tensor], factor: float) -> Tensor:
    """The sum of the gradients, each times ``factor`` to the power of its age."""
    return sum((factor**age * g for age, g in enumerate(reversed(gradients))), torch.zeros_like(gradients[0]))


def mean_of(gradients: Sequence[Tensor], factor: float) -> Tensor:
    """The weighted mean: what a corrected average is."""
    return sum_of(gradients, factor) / sum(factor**age for age in range(len(gradients)))


WAYS = ("raw", "raw squares", "the squares of a mean", "inside", "first step")


def direction(gradients: Sequence[Tensor], options: Options, way: str = "") -> Tensor:
    """Adam's direction after all ``gradients``, or that of a mistake."""
    beta1, beta2 = options["betas"]
    mean, squares = mean_of(gradients, beta1), mean_of([g.square() for g in gradients], beta2)
    if way == "the squares of a mean":
        squares = mean_of(gradients, beta2).square()
    if way == "raw":
        mean = mean * (1 - beta1 ** len(gradients))
    if way in ("raw", "raw squares"):
        squares = squares * (1 - beta2 ** len(gradients))
    if way == "first step":
        first, second = (1 - beta ** len(gradients) for beta in (beta1, beta2))
        mean, squares = mean * first / (1 - beta1), squares * second / (1 - beta2)
    if way == "inside":
        return mean / (squares + options["eps"]).sqrt()
    return mean / (squares.sqrt() + options["eps"])


def directions(gradients: Sequence[Tensor], options: Options, way: str = "") -> list[Tensor]:
    return [direction(gradients[:n], options, way) for n in range(1, len(gradients) + 1)]


def moved(start: Tensor, updates: Sequence[Tensor], lr: float, decay: float = 0.0) -> list[Tensor]:
    """The parameter after each step, with a decoupled decay, which later steps apply to an update too. The
    rate of step k is lr / k."""
    rates = [lr / k for k in range(1, len(updates) + 1)]

    def left(first: int, last: int) -> float:
        return math.prod(1 - rate * decay for rate in rates[first:last])

    return [
        start * left(0, n) - sum(rates[k] * left(k + 1, n) * updates[k] for k in range(n))
        for n in range(1, len(updates) + 1)
    ]


def trace_of(start: Tensor, steps: int, step: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """The values after each step, where a value depends on the last one: ``step(value, n)``, n from 1."""
    values = [start]
    for n in range(1, steps + 1):
        values.append(step(values[-1], n))
    return values[1:]


def averages_of(gradients: Sequence[Tensor], beta: float) -> list[Tensor]:
    return [(1 - beta) * sum_of(gradients[:n], beta) for n in range(1, len(gradients) + 1)]


@twin
def momentum_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of SGD with momentum, and those of mistakes."""
    lr, beta, steps = options["lr"], options["beta"], range(1, len(gradients) + 1)
    return {
        "right": moved(start, averages_of(gradients, beta), lr),
        "sum": moved(start, [sum_of(gradients[:n], beta) for n in steps], lr),
        "swapped": moved(start, averages_of(gradients, 1 - beta), lr),
        "gradient": moved(start, gradients, lr),
        "not kept": moved(start, [(1 - beta) * g for g in gradients], lr),
        "corrected": moved(start, [mean_of(gradients[:n], beta) for n in steps], lr),
    }


@twin
def directions_of(_: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Adam's direction after each step, and those of mistakes."""
    swapped = options | {"betas": options["betas"][::-1]}
    found = {way: directions(gradients, options, way) for way in WAYS}
    return found | {"right": directions(gradients, options), "swapped": directions(gradients, swapped)}


@twin
def adamw_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of AdamW, and those of mistakes in the decay."""
    lr, decay, steps = options["lr"], options["weight_decay"], len(gradients)
    updates, seen = directions(gradients, options), []

    def coupled(value: Tensor, n: int) -> Tensor:
        seen.append(gradients[n - 1] + decay * value)
        return value - lr / n * direction(seen, options)

    def after(value: Tensor, n: int) -> Tensor:
        return (value - lr / n * updates[n - 1]) * (1 - lr / n * decay)

    return {
        "right": moved(start, updates, lr, decay),
        "coupled": trace_of(start, steps, coupled),
        "after": trace_of(start, steps, after),
        "none": moved(start, updates, lr),
        "without rate": trace_of(start, steps, lambda v, n: v * (1 - decay) - lr / n * updates[n - 1]),
    }


def size_of(tensor: Tensor) -> float:
    return float(tensor.square().sum().sqrt())


def is_plain(way: str, *norms: Tensor) -> bool:
    """Whether the ratio is 1: a vector, or a norm of zero, if the mistake ``way`` changes neither."""
    return way == "ratio 1" or (way != "rescaled" and norms[0].ndim < 2) or not all(map(size_of, norms))


@twin
def lars_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of LARS, and those of mistakes."""
    lr, decay, beta, trust = (options[name] for name in ("lr", "weight_decay", "beta", "trust"))

    def trajectory(way: str) -> list[Tensor]:
        pulls: list[Tensor] = []

        def step(value: Tensor, n: int) -> Tensor:
            gradient, size = gradients[n - 1], size_of(value)
            total = size_of(gradient) + (0 if way == "no decay in the norm" else decay * size)
            total = size_of(gradient + decay * value) if way == "norm of the sum" else total
            plain, one = is_plain(way, value, gradient), trust if way == "trust alone" else 1.0
            ratio = one if plain else trust * (total / size if way == "inverse" else size / total)
            ratio *= size > 0 or way != "frozen"
            pulls.append(ratio * (gradient + decay * value))
            return value - lr / n * sum_of(pulls, beta)

        return trace_of(start, len(gradients), step)

    ways = ("right", "ratio 1", "no decay in the norm", "norm of the sum", "inverse", "rescaled", "frozen")
    return {way: trajectory(way) for way in (*ways, "trust alone")}


@twin
def lamb_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of LAMB, and those of mistakes."""
    lr, decay, updates = options["lr"], options["weight_decay"], directions(gradients, options)

    def trajectory(way: str) -> list[Tensor]:
        outside = decay if way == "decay outside" else 0.0

        def step(value: Tensor, n: int) -> Tensor:
            pull, size = updates[n - 1] + (decay - outside) * value, size_of(value)
            length = size_of(updates[n - 1] if way == "norm of u" else pull)
            ratio = 1.0 if is_plain(way, value, pull) or not length else size / length
            ratio *= size > 0 or way != "frozen"
            return value - lr / n * (ratio * pull + outside * value)

        return trace_of(start, len(gradients), step)

    ways = ("right", "ratio 1", "decay outside", "norm of u", "rescaled", "frozen")
    return {way: trajectory(way) for way in ways}


@twin
def lion_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of Lion, and those of mistakes."""
    lr, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]

    def turned(first: float, second: float, early: int = 0, decay: float = decay) -> list[Tensor]:
        averages = [torch.zeros_like(start), *averages_of(gradients, second)][early:]
        signs = [(first * old + (1 - first) * g).sign() for old, g in zip(averages, gradients)]
        return moved(start, signs, lr, decay)

    return {
        "right": turned(beta1, beta2),
        "no decay": turned(beta1, beta2, decay=0.0),
        "one average": turned(1.0, beta2, early=1),
        "swapped": turned(beta2, beta1),
        "beta1 twice": turned(beta1, beta1),
        "moved first": turned(beta1, beta2, early=1),
        "gradient": turned(0.0, beta2),
    }


def polynomial(matrix: Tensor, steps: int, largest: bool = False) -> Tensor:
    """The Newton-Schulz iteration of a matrix, through its singular values; ``largest``: divided by the
    largest of them instead of the norm."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (values.max() if largest else values.square().sum().sqrt() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = values * (a + b * values**2 + c * values**4)
    return (left * values) @ right


@twin
def orthogonal_of(matrix: Tensor, steps: int) -> dict[str, Tensor]:
    """The result of ``orthogonalised``, and those of mistakes."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return {
        "right": polynomial(matrix, steps),
        "largest": polynomial(matrix, steps, largest=True),
        "exact": left @ right,
        "fewer": polynomial(matrix, steps - 1),
        "more": polynomial(matrix, steps + 1),
    }


@twin
def squared_elements(matrix: Tensor) -> Tensor:
    """The result of one step in which the elements of A are squared."""
    x = matrix / size_of(matrix)
    gram = x @ x.T
    return polynomial(matrix, 1) + COEFFICIENTS[2] * (gram.square() - gram @ gram) @ x


@twin
def muon_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of Muon on a matrix or a convolution, and those of mistakes."""
    lr, decay, beta = options["lr"], options["weight_decay"], options["beta"]
    averages = averages_of(gradients, beta)
    ahead = [beta * m + (1 - beta) * g for m, g in zip(averages, gradients)]

    def turned(updates: Sequence[Tensor], longer: float, decay: float = decay) -> list[Tensor]:
        matrices = [polynomial(u.reshape(len(u), -1), 5).reshape(u.shape) for u in updates]
        return moved(start, [0.2 * math.sqrt(longer) * matrix for matrix in matrices], lr, decay)

    columns = start[0].numel()
    longer = max(len(start), columns)
    return {
        "right": turned(ahead, longer),
        "not ahead": turned(averages, longer),
        "no scale": turned(ahead, 25.0),
        "columns": turned(ahead, columns),
        "sizes": turned(ahead, max(start.shape)),
        "gradient": turned(gradients, longer),
        "no decay": turned(ahead, longer, decay=0.0),
    }


Batches = list[list[tuple[Tensor, Tensor]]]


def slope(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return 2 / y.numel() * (x @ w.T - y).T @ x


@twin
def watched_step(weight: Tensor, batches: Batches, rate: float, most: float) -> dict[str, list[Tensor]]:
    """The weight after one step on equal parts whose losses depend on the gradient of the parts before them,
    and with mistakes."""
    parts, total = batches[0], torch.zeros_like(weight)
    each = [slope(weight, *part) / len(parts) for part in parts]
    places = torch.arange(1, weight.numel() + 1, dtype=weight.dtype).view_as(weight)
    for own in each:
        before = total.square()
        total = total + own * (1 + (before * places).sum() / before.sum().clamp(min=1e-30))
    found = {"right": total, "together": sum(each), "sum": total * len(parts), "last part": each[-1]}
    return {way: [weight - rate * gradient] for way, gradient in found.items()}


@twin
def descended(weight: Tensor, batches: Batches, rate: float, most: float) -> dict[str, list[Tensor]]:
    """The weight of a linear model after steps on whole batches, and with mistakes. Before the first step the
    gradient is 1."""

    def clipped(g: Tensor) -> Tensor:
        return g * min(1.0, most / size_of(g))

    def after_step(way: str, value: Tensor, parts: list, kept: Tensor) -> Tensor:
        """The gradient of a step; ``kept``: that of the step before."""
        each = [slope(value, *part) for part in parts]
        shares = [len(part[0]) / sum(len(part[0]) for part in parts) for part in parts]
        own = [share * g for share, g in zip(shares, each)]
        if way in ("not clipped", "each clipped"):
            return sum(share * (clipped(g) if "each" in way else g) for share, g in zip(shares, each))
        if way == "clipped again":
            return functools.reduce(lambda total, g: clipped(total + g), own, torch.zeros_like(value))
        means = {"mean of means": sum(each) / len(each), "sum": sum(each), "last part": own[-1]}
        return clipped({**means, "kept": sum(own) + kept}.get(way, sum(own)))

    found: dict[str, list[Tensor]] = {}
    ways = ("right", "mean of means", "sum", "last part", "kept")
    for way in (*ways, "each clipped", "clipped again", "not clipped"):
        value, kept, found[way] = weight, torch.ones_like(weight), []
        for parts in batches:
            kept = after_step(way, value, parts, kept)
            value = value - rate * kept
            found[way].append(value)
    return found
