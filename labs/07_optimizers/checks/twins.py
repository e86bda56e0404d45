"""The references of the checks, in float64 and by another form than the exercises: averages as weighted sums
over all gradients, decays as powers, polynomials of matrices through their singular values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def direction(
    gradients: Sequence[Tensor], options: Options, way: str = "", betas: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Adam's direction after all ``gradients``, or that of a mistake."""
    (beta1, beta2), eps = options["betas"] if betas == (0.0, 0.0) else betas, options["eps"]
    if way == "the squares of a mean":
        squares = mean_of(gradients, beta2).square()
    else:
        squares = mean_of([g.square() for g in gradients], beta2)
    mean = mean_of(gradients, beta1)
    if way in ("nothing corrected", "nothing corrected, inside"):
        mean = mean * (1 - beta1 ** len(gradients))
    if way in ("nothing corrected", "squares not corrected", "nothing corrected, inside"):
        squares = squares * (1 - beta2 ** len(gradients))
    if "inside" in way:
        return mean / (squares + eps).sqrt()
    return mean / (squares.sqrt() + eps)


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


def momentum_updates(gradients: Sequence[Tensor], beta: float) -> list[Tensor]:
    return [(1 - beta) * sum_of(gradients[:n], beta) for n in range(1, len(gradients) + 1)]


@twin
def momentum_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of SGD with momentum, and those of mistakes."""
    lr, beta = options["lr"], options["beta"]
    plain = [sum_of(gradients[:n], beta) for n in range(1, len(gradients) + 1)]
    swapped = momentum_updates(gradients, 1 - beta)
    return {
        "right": moved(start, momentum_updates(gradients, beta), lr),
        "sum": moved(start, plain, lr),
        "swapped": moved(start, swapped, lr),
        "gradient": moved(start, gradients, lr),
        "corrected": moved(start, [mean_of(gradients[:n], beta) for n in range(1, len(gradients) + 1)], lr),
    }


@twin
def directions_of(gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Adam's direction after each step, and those of mistakes."""
    steps, (beta1, beta2) = range(1, len(gradients) + 1), options["betas"]
    ways = ("", "inside", "nothing corrected", "squares not corrected", "the squares of a mean")
    found = {way: [direction(gradients[:n], options, way) for n in steps] for way in ways}
    found["swapped"] = [direction(gradients[:n], options, betas=(beta2, beta1)) for n in steps]
    return found


@twin
def adamw_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of AdamW, and those of mistakes in the decay."""
    lr, decay, steps = options["lr"], options["weight_decay"], range(1, len(gradients) + 1)
    updates = [direction(gradients[:n], options) for n in steps]
    coupled, seen, value = [], [], start
    for n, gradient in enumerate(gradients, 1):
        seen.append(gradient + decay * value)
        value = value - lr / n * direction(seen, options)
        coupled.append(value)
    after, value, without, other = [], start, [], start
    for n, update in enumerate(updates, 1):
        value = (value - lr / n * update) * (1 - lr / n * decay)
        other = other * (1 - decay) - lr / n * update
        after.append(value)
        without.append(other)
    return {
        "right": moved(start, updates, lr, decay),
        "coupled": coupled,
        "after": after,
        "none": moved(start, updates, lr),
        "without rate": without,
    }


def unit(tensor: Tensor) -> Tensor:
    return tensor / tensor.square().sum().sqrt()


@twin
def lars_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of LARS, and those of mistakes; a vector, and what is zero, has the ratio 1."""
    lr, decay, beta, trust = (options[name] for name in ("lr", "weight_decay", "beta", "trust"))
    found = {}
    for way in ("right", "ratio 1", "no decay in the norm", "inverse", "rescaled", "frozen"):
        value, pulls, trace = start, [], []
        for n, gradient in enumerate(gradients, 1):
            size, slope = float(value.square().sum().sqrt()), float(gradient.square().sum().sqrt())
            total = slope + (0 if way == "no decay in the norm" else decay * size)
            plain = way == "ratio 1" or (way != "rescaled" and start.ndim < 2) or not size * slope
            ratio = 1.0 if plain else trust * (total / size if way == "inverse" else size / total)
            ratio *= size > 0 or way != "frozen"
            pulls.append(ratio * (gradient + decay * value))
            value = value - lr / n * sum_of(pulls, beta)
            trace.append(value)
        found[way] = trace
    return found


@twin
def lamb_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of LAMB, and those of mistakes."""
    lr, decay = options["lr"], options["weight_decay"]
    found = {}
    for way in ("right", "ratio 1", "decay outside", "rescaled", "frozen"):
        value, trace = start, []
        for n in range(1, len(gradients) + 1):
            update = direction(gradients[:n], options)
            pull = update + (0 if way == "decay outside" else decay) * value
            size = value.square().sum().sqrt()
            plain = way == "ratio 1" or (way != "rescaled" and start.ndim < 2) or not float(size)
            moved_by = pull if plain or not float(pull.abs().max()) else size * unit(pull)
            moved_by = moved_by * (float(size) > 0 or way != "frozen")
            value = value - lr / n * moved_by - (lr / n * decay * value if way == "decay outside" else 0)
            trace.append(value)
        found[way] = trace
    return found


@twin
def lion_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of Lion, and those of mistakes."""
    lr, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]
    steps, zero = range(len(gradients)), torch.zeros_like(start)

    def average(n: int, factor: float) -> Tensor:
        return (1 - factor) * sum_of(gradients[:n], factor) if n else zero

    def signs(first: float, second: float) -> list[Tensor]:
        return [(first * average(n, second) + (1 - first) * gradients[n]).sign() for n in steps]

    right = signs(beta1, beta2)
    return {
        "right": moved(start, right, lr, decay),
        "no decay": moved(start, right, lr),
        "one average": moved(start, [average(n + 1, beta2).sign() for n in steps], lr, decay),
        "swapped": moved(start, signs(beta2, beta1), lr, decay),
        "moved first": moved(
            start,
            [(beta1 * average(n + 1, beta2) + (1 - beta1) * gradients[n]).sign() for n in steps],
            lr,
            decay,
        ),
        "gradient": moved(start, [g.sign() for g in gradients], lr, decay),
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
    return {
        "right": polynomial(matrix, steps),
        "largest": polynomial(matrix, steps, largest=True),
        "exact": torch.linalg.svd(matrix, full_matrices=False)[0]
        @ torch.linalg.svd(matrix, full_matrices=False)[2],
        "fewer": polynomial(matrix, steps - 1),
        "more": polynomial(matrix, steps + 1),
    }


@twin
def muon_of(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The trajectory of Muon on a matrix or a convolution, and those of mistakes."""
    lr, decay, beta = options["lr"], options["weight_decay"], options["beta"]
    averages = momentum_updates(gradients, beta)
    ahead = [beta * m + (1 - beta) * g for m, g in zip(averages, gradients)]
    longer = max(start.shape[0], start[0].numel())

    def turned(updates: Sequence[Tensor], factor: float) -> list[Tensor]:
        matrices = [polynomial(u.reshape(len(u), -1), 5).reshape(u.shape) for u in updates]
        return [factor * matrix for matrix in matrices]

    factor = 0.2 * math.sqrt(longer)
    return {
        "right": moved(start, turned(ahead, factor), lr, decay),
        "not ahead": moved(start, turned(averages, factor), lr, decay),
        "no scale": moved(start, turned(ahead, 1.0), lr, decay),
        "columns": moved(start, turned(ahead, 0.2 * math.sqrt(start[0].numel())), lr, decay),
        "gradient": moved(start, turned(gradients, factor), lr, decay),
        "no decay": moved(start, turned(ahead, factor), lr),
    }


@twin
def rule_of(
    starts: list[Tensor], gradients: list[list[Tensor | None]], rates: list[float]
) -> dict[str, list[list[Tensor]]]:
    """The parameters after each step of the update ``counted`` of the scenarios, and with mistakes."""
    found = {}
    for way in ("right", "forgotten", "one state"):
        values, seen, trace, calls = list(starts), [[] for _ in starts], [], 0
        everything: list[Tensor] = []
        for step in gradients:
            for number, gradient in enumerate(step):
                if gradient is None:
                    continue
                calls += 1
                seen[number] = [gradient] if way == "forgotten" else [*seen[number], gradient]
                one = way == "one state"
                everything.append(gradient)
                length, summed = (calls, everything) if one else (len(seen[number]), seen[number])
                values[number] = values[number] - rates[number] * length * sum(summed)
            trace.append(list(values))
        found[way] = trace
    return found


@twin
def descended(
    weight: Tensor, batches: list[list[tuple[Tensor, Tensor, Tensor]]], rate: float, most: float
) -> dict[str, list[Tensor]]:
    """The weight of a linear model after steps on whole batches, and with mistakes. Before the first step the
    gradient is 1."""

    def slope(w: Tensor, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        return factor * 2 / y.numel() * (x @ w.T - y).T @ x

    def shortened(g: Tensor, limit: float) -> Tensor:
        return g * min(1.0, limit / float(g.square().sum().sqrt()))

    found = {}
    ways = (
        "right",
        "mean of means",
        "sum",
        "last part",
        "kept",
        "each clipped",
        "clipped again",
        "not clipped",
    )
    for way in ways:
        value, kept, trace = weight, torch.ones_like(weight), []
        for parts in batches:
            each = [slope(value, *part) for part in parts]
            samples = sum(len(part[0]) for part in parts)
            shares = [len(part[0]) / samples for part in parts]
            whole = sum((share * g for share, g in zip(shares, each)), torch.zeros_like(weight))
            again = torch.zeros_like(weight)
            for share, g in zip(shares, each):
                again = shortened(again + share * g, most)
            other = {
                "mean of means": sum(each) / len(each),
                "sum": sum(each),
                "last part": shares[-1] * each[-1],
                "kept": whole + kept,
                "each clipped": sum(share * shortened(g, most) for share, g in zip(shares, each)),
                "clipped again": again,
            }
            free = way in ("not clipped", "each clipped")
            kept = shortened(other.get(way, whole), math.inf if free else most)
            value = value - rate * kept
            trace.append(value)
        found[way] = trace
    return found


@twin
def rayleigh(matrix: Tensor, start: Tensor, steps: int) -> dict[str, float]:
    """The quotient after ``steps`` products with a symmetric matrix, from its eigenvalues; and the length of
    the last product, which has no sign."""
    values, vectors = torch.linalg.eigh(matrix)
    weights = (vectors.T @ start).square() * (values / values.abs().max()) ** (2 * (steps - 1))
    weights = weights / weights.sum()
    return {"right": float(weights @ values), "length": float((weights @ values**2).sqrt())}
