"""Bootstrap confidence intervals for the mean of a few repeats.

    1. Draw N of the N values with replacement and compute their mean. Repeat this ``draws`` times.
    2. The 95 % interval reaches from the 2.5 % quantile to the 97.5 % quantile of these means.

Compare two methods on the *same* repeats (the same seeds). The interval of the paired differences shows
whether one method is better; two separate intervals do not show it.

B. Efron, Bootstrap Methods: Another Look at the Jackknife (1979), doi:10.1214/aos/1176344552.
Cost: ``draws`` means. With fewer than about ten values the interval is too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlo_lib.base.errors import UserError


@dataclass(frozen=True)
class Interval:
    """The mean of the values with its confidence interval."""

    low: float
    mean: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the mean is significant at the chosen level."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap_mean(
    values: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """Compute the mean of ``values`` with its percentile interval.

    Raises:
        UserError: fewer than two values, or one that is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2 or not np.isfinite(sample).all():
        raise UserError(f"an interval needs at least 2 finite values, got {len(sample)}")
    chosen = np.random.default_rng(seed).integers(len(sample), size=(draws, len(sample)))
    low, high = np.quantile(sample[chosen].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(sample.mean()), float(high))


def bootstrap_difference(
    left: Sequence[float], right: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """Compute the mean of the paired differences ``left - right`` with its percentile interval.

    Raises:
        UserError: the two lengths differ, or there are fewer than two values.
    """
    if len(left) != len(right):
        raise UserError(
            f"{len(left)} repeats and {len(right)} repeats: compare the same repeats (the same seeds)"
        )
    return bootstrap_mean([a - b for a, b in zip(left, right)], level=level, draws=draws, seed=seed)
