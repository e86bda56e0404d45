"""The bootstrap interval against scipy's, its coverage, and the figures of a search."""

from __future__ import annotations

import numpy as np
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.hpo.bootstrap import bootstrap_difference, bootstrap_mean
from dlo_lib.hpo.draw import draw_timeline, draw_trials
from dlo_lib.hpo.halving import SuccessiveHalving
from dlo_lib.hpo.simulate import simulate
from tests.lazy import Lazy

stats = Lazy("scipy.stats")


def test_the_interval_is_that_of_scipy():
    values = np.random.default_rng(0).exponential(size=25)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    ours = bootstrap_mean(values, draws=20_000)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    assert ours.mean == pytest.approx(values.mean())


def test_the_interval_covers_the_true_mean_at_its_level():
    generator = np.random.default_rng(2)
    intervals = [bootstrap_mean(generator.normal(3, 2, size=30), draws=500) for _ in range(300)]
    held = np.mean([interval.low <= 3 <= interval.high for interval in intervals])
    assert 0.89 <= held <= 0.99


def test_paired_differences_are_significant_where_separate_intervals_overlap():
    generator = np.random.default_rng(3)
    luck = generator.normal(0, 5, size=20)
    left, right = luck + 1, luck + generator.normal(0, 0.3, size=20)
    assert bootstrap_difference(left, right).excludes_zero
    assert bootstrap_mean(left).low < bootstrap_mean(right).high


@pytest.mark.parametrize("values", [[1.0], [1.0, float("inf")]])
def test_too_few_or_infinite_values_raise(values):
    with pytest.raises(UserError):
        bootstrap_mean(values)
    with pytest.raises(UserError):
        bootstrap_difference([1.0, 2.0], [1.0])


def test_figures_show_every_trial_and_every_task():
    run = simulate(
        SuccessiveHalving(9, 1, 9), lambda row, resource: row.number + 1.0, lambda table: {}, workers=3
    )
    (lines,) = draw_trials(run.table).axes
    assert len(lines.lines) == 9
    (bars,) = draw_timeline({"halving": run}).axes
    assert len(bars.patches) == len(run.spans) == 9 + 3 + 1
    assert "ends at" in bars.get_title(loc="left")
