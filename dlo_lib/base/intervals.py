"""Confidence intervals of a few numbers by Student's t, and pairs of runs that cannot be distinguished.

    mean ± t s / sqrt(n)        s² with n - 1, t the quantile of n - 1 degrees of freedom

Two entries that were measured with the same n seeds are compared by the n differences of their pairs, because
a seed that is easy for one is easy for the other. If the interval contains 0, these runs show no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

_STEPS = 400


@dataclass(frozen=True)
class MeanInterval:
    """A mean and its interval; the interval of one number is infinite."""

    mean: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        """Whether the mean may be 0."""
        return self.low <= 0 <= self.high


def mean_interval(values: Sequence[float], level: float = 0.95) -> MeanInterval:
    """Return the mean of ``values``, at least one, and its interval at ``level``."""
    mean = fmean(values)
    half = math.inf
    if len(values) > 1:
        half = t_quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))
    return MeanInterval(mean, mean - half, mean + half)


def difference(ours: Sequence[float], theirs: Sequence[float], level: float = 0.95) -> MeanInterval:
    """Return the mean of ``ours`` - ``theirs``, pairs of the same seeds, and its interval.

    Raises:
        ValueError: the two have not as many values.
    """
    return mean_interval([one - other for one, other in zip(ours, theirs, strict=True)], level)


@lru_cache
def t_quantile(degrees: int, level: float = 0.95) -> float:
    """Return the number t for which a variable of Student's distribution lies in (-t, t) with probability
    ``level``.

    >>> round(t_quantile(4), 3)
    2.776
    """
    low, high = 0.0, 1.0
    while _central(high, degrees) < level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, degrees) < level else (low, middle)
    return high


def _central(t: float, degrees: int) -> float:
    """Return the probability of (-t, t), by Simpson's rule over the angle a with tan a = x / sqrt(degrees).

    The density of the angle is proportional to cos(a) ** (degrees - 1), which is smooth for every t.
    """
    end = math.atan(t / math.sqrt(degrees))
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    width = end / _STEPS
    heights = [math.cos(width * step) ** (degrees - 1) for step in range(_STEPS + 1)]
    whole = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return 2 * constant * whole * width / 3
