"""What the results are compared with, each by another method than the solution, and drawn cases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Trial
from dlo_lib.grading.checks.twins import twin
from dlo_lib.labkit.compare import double


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The index of the level next to each number."""
    return (x[..., None] - levels).abs().argmin(-1)


def absmax_grid(x: Tensor, bits: int) -> tuple[Tensor, float]:
    """The integers and the scale of an absmax grid, by the distance to all of its levels."""
    most = 2 ** (bits - 1) - 1
    scale = float(x.abs().max()) / most or 1.0
    levels = scale * torch.arange(-most, most + 1, dtype=x.dtype)
    return (nearest(x, levels) - most).to(torch.int8), scale


def zero_point_grid(x: Tensor, bits: int) -> tuple[Tensor, float, int]:
    """The integers, the scale and the zero-point of the grid that covers x and 0."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / (2**bits - 1) or 1.0
    least = -(2 ** (bits - 1))
    zero = least - round(low / scale)
    levels = scale * (torch.arange(least, -least, dtype=x.dtype) - zero)
    return (nearest(x, levels) + least).to(torch.int8), scale, zero


def in_groups(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """The integers and the scales of absmax grids for groups, one group after the other."""
    rows, scales = [], []
    for row in w:
        parts = [absmax_grid(part, bits) for part in row.split(group)]
        rows.append(torch.cat([q for q, _ in parts]))
        scales.append([scale for _, scale in parts])
    return torch.stack(rows), torch.tensor(scales, dtype=w.dtype)


def restored(q: Tensor, scale: Tensor) -> Tensor:
    """The numbers of integers (out, in) with scales (out, groups)."""
    return q.to(scale.dtype) * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)


def rounded(w: Tensor, bits: int, group: int | None = None) -> Tensor:
    """The weights on absmax grids for groups; None: a grid for each row."""
    return restored(*in_groups(w, bits, group or w.shape[1]))


def percentile(batches: list[Tensor], p: float) -> tuple[float, float]:
    """Both percentiles, by a sorted list."""
    values = sorted(value for batch in batches for value in batch.flatten().tolist())

    def at(part: float) -> float:
        place = part * (len(values) - 1)
        below = min(int(place), len(values) - 2)
        return values[below] + (place - below) * (values[below + 1] - values[below])

    return at(1 - p / 100), at(p / 100)


def exact(qx: Tensor, zero: int, qw: Tensor, bias: Tensor) -> Tensor:
    """(qx - zero) qw^T + bias in int64, returned in int32."""
    return ((qx.long() - zero) @ qw.long().t() + bias.long()).to(torch.int32)


def with_outliers(x: Tensor, w: Tensor, threshold: float) -> Tensor:
    """LLM.int8(), column by column in the floating-point part."""
    out = [j for j in range(x.shape[1]) if float(x[:, j].abs().max()) >= threshold]
    rest = [j for j in range(x.shape[1]) if j not in out]
    result = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype)
    for j in out:
        result += torch.outer(x[:, j], w[:, j])
    return result + rounded(x[:, rest], 8) @ rounded(w[:, rest], 8).t() if rest else result


def drawn_outliers(t: Trial, tokens: int, inputs: int, count: int, size: float = 40.0) -> tuple[Tensor, list]:
    """Activations in fp64 with `count` outlier channels, and their sorted indices."""
    x = double(t, tokens, inputs).clamp(-3, 3)
    columns = sorted(t.shuffled(list(range(inputs)))[:count])
    x[:, columns] = size * (x[:, columns].sign() + x[:, columns] / 4)
    x[0, columns] = x[0, columns].abs()
    return x, columns


def smoothing(weights: list[Tensor], largest: Tensor, a: float) -> Tensor:
    """The factors of SmoothQuant, channel by channel."""
    found = []
    for j, of_x in enumerate(largest.tolist()):
        of_w = max(1e-5, *(float(w[:, j].abs().max()) for w in weights))
        found.append(math.exp(a * math.log(max(of_x, 1e-5)) - (1 - a) * math.log(of_w)))
    return torch.tensor(found, dtype=largest.dtype)


@twin
def awq_both(x: Tensor, w: Tensor, bits: int, group: int, steps: int) -> tuple[list[float], list[float]]:
    """The error of the output for each exponent, and that of the weights."""
    mean, errors, of_weights = x.abs().mean(0).clamp(min=1e-4), [], []
    for step in range(steps + 1):
        s = mean ** (step / steps)
        new = rounded(w * s, bits, group)
        errors.append(float(((x / s) @ new.t() - x @ w.t()).square().sum()))
        of_weights.append(float((new / s - w).square().sum()))
    return errors, of_weights


def awq_errors(x: Tensor, w: Tensor, bits: int, group: int, steps: int) -> list[float]:
    """The error of the output for each exponent."""
    return awq_both(x, w, bits, group, steps)[0]


@twin
def gptq_by_inverses(x: Tensor, w: Tensor, bits: int, damping: float) -> tuple[Tensor, Tensor]:
    """GPTQ row by row, with a new inverse of the Hessian of the remaining columns for each column."""
    h = damped(x, damping)
    inverses = [torch.linalg.inv(h[j:, j:])[0] for j in range(len(h))]
    return moved_along(inverses, w, bits)


def damped(x: Tensor, damping: float) -> Tensor:
    """The Hessian, with a part of the mean of its diagonal."""
    h = x.t() @ x
    return h + damping * float(h.diagonal().mean()) * torch.eye(len(h), dtype=h.dtype)


@twin
def wrong_factors(x: Tensor, w: Tensor, bits: int, damping: float) -> dict[str, Tensor]:
    """A message for each wrong factor → the integers that it gives."""
    h = damped(x, damping)
    wrong = {
        "U is a factor of H: it should be that of the inverse of H": torch.linalg.cholesky(h).t(),
        "the inverse of H is used instead of its factor U": torch.linalg.inv(h),
    }
    moved = {message: [row[j:] for j, row in enumerate(factor)] for message, factor in wrong.items()}
    return {message: moved_along(rows, w, bits)[0] for message, rows in moved.items()}


def moved_along(directions: list[Tensor], w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The integers if the error of a column moves it and all later ones along its direction."""
    most = 2 ** (bits - 1) - 1
    q = torch.zeros(w.shape, dtype=torch.int8)
    scales = w.abs().amax(1, keepdim=True) / most
    for row in range(len(w)):
        left = w[row].clone()
        for j, direction in enumerate(directions):
            q[row, j] = int(torch.round(left[j] / scales[row, 0]).clamp(-most, most))
            error = (left[j] - q[row, j] * scales[row, 0]) / direction[0]
            left[j:] -= error * direction
    return q, scales


def correlated(t: Trial, tokens: int, inputs: int) -> Tensor:
    """Inputs in fp64 that depend on a quarter as many hidden numbers, like activations."""
    hidden = double(t, max(2, inputs // 4), inputs)
    return double(t, tokens, len(hidden)) @ hidden + 0.2 * double(t, tokens, inputs)


def ternary_weights(w: Tensor) -> Tensor:
    """The ternary weights, by thresholds at half of the mean."""
    g = float(w.abs().mean()) or 1.0
    return g * w.sign() * (w.abs() > g / 2)
