"""How sure is a mean over a few repeats? The bootstrap draws the repeats again, with replacement, and looks how far the mean moves.

    draw N of the N values with replacement, take the mean; the interval is from the 2.5 % to the 97.5 % quantile of many such means

Two methods are compared on the *same* repeats (the same seeds): the interval of their differences says whether one is better, which two
intervals side by side do not. B. Efron, Bootstrap Methods: Another Look at the Jackknife (1979), doi:10.1214/aos/1176344552.
Cost: ``draws`` means. With fewer than about ten values the interval is too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlo_lib.errors import UserError


@dataclass(frozen=True)
class Interval:
    """The mean of the values, and where it may lie."""

    low: float
    mean: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the mean is sure at the chosen level."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap_mean(values: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Interval:
    """The mean of ``values`` with its percentile interval.

    Raises:
        UserError: fewer than two values, or one that is not finite.
    """
    told = np.asarray(values, dtype=np.float64)
    if len(told) < 2 or not np.isfinite(told).all():
        raise UserError(f"an interval of {len(told)} values: give at least 2, all finite")
    chosen = np.random.default_rng(seed).integers(len(told), size=(draws, len(told)))
    low, high = np.quantile(told[chosen].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(told.mean()), float(high))


def bootstrap_difference(
    left: Sequence[float], right: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """The mean of ``left - right``, repeat by repeat.

    Raises:
        UserError: not as many on both sides, or too few.
    """
    if len(left) != len(right):
        raise UserError(f"{len(left)} repeats against {len(right)}: compare the same repeats (the same seeds)")
    return bootstrap_mean([a - b for a, b in zip(left, right)], level=level, draws=draws, seed=seed)
