"""Intervals by Student's t, compared with published quantiles, and paired differences."""

from __future__ import annotations

import math
import random

import pytest

from dlo_lib.base.intervals import difference, mean_interval, t_quantile


@pytest.mark.parametrize(
    ("degrees", "level", "published"),
    [
        (1, 0.95, 12.706), (2, 0.95, 4.303), (4, 0.95, 2.776), (9, 0.95, 2.262), (30, 0.95, 2.042),
        (1, 0.99, 63.657), (4, 0.99, 4.604), (120, 0.99, 2.617), (2, 0.5, 0.816),
    ],
)  # fmt: skip
def test_the_quantiles_are_those_of_the_tables(degrees, level, published):
    assert t_quantile(degrees, level) == pytest.approx(published, abs=6e-4)


def test_the_interval_of_five_numbers():
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764 * math.sqrt(2.5 / 5)
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3 - half, 3 + half), rel=1e-4)


def test_one_number_says_nothing_and_equal_ones_everything():
    assert mean_interval([0.9]).low == -math.inf
    assert (mean_interval([0.9] * 3).low, mean_interval([0.9] * 3).high) == pytest.approx((0.9, 0.9))


def test_pairs_show_a_difference_that_the_seeds_hide():
    ours = [0.70, 0.80, 0.90, 0.60, 0.85]
    theirs = [value - 0.01 - 0.001 * (number % 2) for number, value in enumerate(ours)]
    assert not difference(ours, theirs).contains_zero
    assert mean_interval(ours).low < mean_interval(theirs).mean
    assert difference(ours, ours).contains_zero
    with pytest.raises(ValueError):
        difference(ours, theirs[:-1])


def test_an_interval_contains_the_mean_as_often_as_it_says():
    draw = random.Random(0)
    samples = [mean_interval([draw.gauss(0, 1) for _ in range(4)]) for _ in range(4_000)]
    share = sum(sample.contains_zero for sample in samples) / len(samples)
    assert share == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 4_000))
