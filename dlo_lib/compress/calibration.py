"""Calibration: the range of activations, from batches.

A weight is known, an activation is not: static quantization fixes its grid from a few batches.

- min-max: the smallest and the largest value seen. One outlier widens the grid for all values.
- percentile p: from the (100 - p)-th to the p-th percentile. Values outside are clipped.
- mean squared error: the part of the min-max range with the smallest expected error, rounding plus clipping.

The last two keep a histogram of 2 B bins over -R to R, where R is a power of two. When a value exceeds R, R
is doubled and each pair of bins becomes one, so the memory is constant and the counts stay exact. A
percentile is exact to one bin, R / B.

Paper: Integer quantization for deep learning inference (arXiv:2004.09602), section on calibration.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.compress.grid import (
    IntegerGrid,
    dequantize,
    grid_from_range,
    integer_range,
    require_finite,
    widened,
)


class MinMaxObserver:
    """The smallest and the largest value of all batches."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf

    def observe(self, x: Tensor) -> None:
        """Read a batch of activations, of any shape.

        Raises:
            UserError: ``x`` contains NaN or infinity.
        """
        require_finite("x", x)
        if x.numel():
            self.low, self.high = min(self.low, float(x.amin())), max(self.high, float(x.amax()))

    def range(self, bits: int = 8, symmetric: bool = True) -> tuple[float, float]:
        """Return the lower and the upper bound that the method chooses.

        Raises:
            UserError: no value was observed.
        """
        if self.low > self.high:
            raise UserError("no activation was observed: call observe with at least one batch first")
        return self.low, self.high

    def grid(self, bits: int = 8, symmetric: bool = True) -> IntegerGrid:
        """Return the grid (scale () in fp32) that covers the range.

        Raises:
            UserError: no value was observed, or ``bits`` is not 2 to 8.
        """
        low, high = self.range(bits, symmetric)
        return grid_from_range(torch.tensor(low), torch.tensor(high), bits, symmetric)


class HistogramObserver(MinMaxObserver):
    """The counts of all values in 2 ``bins`` bins: counts (2 bins,) int64 over -bound to bound."""

    def __init__(self, bins: int = 2048) -> None:
        super().__init__()
        require_count("bins", bins, least=2)
        if bins % 2:
            raise UserError(f"bins is {bins}: use an even number, because pairs of bins are merged")
        self.bins = bins
        self.bound = 0.0
        self.counts = torch.zeros(2 * bins, dtype=torch.int64)

    def observe(self, x: Tensor) -> None:
        super().observe(x)
        # fp64, so that the position of a value in the histogram is exact: bound / bins is a power of two
        # times 1 / bins.
        values = x.detach().flatten().double().cpu()
        if not values.numel():
            return
        largest = float(values.abs().amax())
        if largest and not self.bound:
            self._start(largest)
        while largest > self.bound and self.bound:
            halves = self.counts.view(-1, 2).sum(-1)
            self.counts = torch.nn.functional.pad(halves, (self.bins // 2, self.bins // 2))
            self.bound *= 2
        width = self.bound / self.bins or 1.0
        place = (values / width).floor().long().add_(self.bins).clamp_(0, 2 * self.bins - 1)
        self.counts += torch.bincount(place, minlength=2 * self.bins)

    def _start(self, largest: float) -> None:
        # frexp gives largest < 2 ** exponent. Zeros seen earlier stay in the bin above 0.
        self.bound = 2.0 ** math.frexp(largest)[1]

    def edges(self) -> Tensor:
        """Return the edges of the bins, (2 bins + 1,) fp64."""
        return torch.arange(-self.bins, self.bins + 1, dtype=torch.float64) * (self.bound / self.bins)


class PercentileObserver(HistogramObserver):
    """The range from the (100 - ``percentile``)-th to the ``percentile``-th percentile, exact to one bin.

    Both bounds are those of a bin, and within the smallest and the largest value.

    Args:
        percentile: above 50, at most 100, which is min-max.
        bins: half the number of bins, even.

    Raises:
        UserError: ``percentile`` or ``bins`` is out of range.
    """

    def __init__(self, percentile: float = 99.9, bins: int = 2048) -> None:
        super().__init__(bins)
        if not 50 < percentile <= 100:
            raise UserError(f"percentile is {percentile}: use a number above 50, at most 100")
        self.percentile = percentile

    def range(self, bits: int = 8, symmetric: bool = True) -> tuple[float, float]:
        low, high = super().range(bits, symmetric)
        total = int(self.counts.sum())
        outside = math.floor(total * (1 - self.percentile / 100) + 1e-9)
        if not outside:
            return low, high
        up = self.counts.cumsum(0)
        down = self.counts.flip(0).cumsum(0)
        first = int((up > outside).nonzero()[0])
        last = 2 * self.bins - 1 - int((down > outside).nonzero()[0])
        edges = self.edges()
        return max(low, float(edges[first])), min(high, float(edges[last + 1]))


class MSEObserver(HistogramObserver):
    """The fraction of the min-max range whose grid has the smallest mean squared error over the histogram.

    Each value counts as the centre of its bin.

    Args:
        steps: the number of fractions tried, 1 / steps to 1.
        bins: half the number of bins, even.

    Raises:
        UserError: ``steps`` or ``bins`` is out of range.
    """

    def __init__(self, steps: int = 100, bins: int = 2048) -> None:
        super().__init__(bins)
        require_count("steps", steps)
        self.steps = steps

    def range(self, bits: int = 8, symmetric: bool = True) -> tuple[float, float]:
        low, high = super().range(bits, symmetric)
        edges = self.edges()
        centres = ((edges[1:] + edges[:-1]) / 2).clamp(low, high)
        used = self.counts > 0
        centres, weights = centres[used], self.counts[used].double()
        parts = torch.arange(1, self.steps + 1, dtype=torch.float64)[:, None] / self.steps
        grid = grid_from_range(parts * low, parts * high, bits, symmetric)
        least, most = integer_range(bits, symmetric)
        q = ((centres / grid.scale).round() + grid.zero_point).clamp(least, most)
        errors = ((dequantize(q, grid) - centres).square() * weights).sum(-1)
        # The widest of equal fractions clips least.
        best = self.steps - 1 - int(errors.flip(0).argmin())
        return low * float(parts[best]), high * float(parts[best])


def channel_absmax(x: Tensor) -> Tensor:
    """Return the largest absolute value of each channel of ``x`` (..., n): (n,), fp32 or wider.

    Raises:
        UserError: ``x`` contains NaN or infinity, or no values.
    """
    require_finite("x", x)
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x
    if not x.numel():
        raise UserError(f"x has shape {tuple(x.shape)}: give at least one token")
    return widened(rows).abs().amax(0)
