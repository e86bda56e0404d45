"""Scaling laws: known coefficients are found again, the best model for a budget, intervals, bad runs."""

from __future__ import annotations

import numpy as np
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.planner.laws import (
    ChinchillaLaw,
    PowerLaw,
    bootstrap,
    fit_chinchilla,
    fit_power_law,
    fit_with_floor,
)

N = np.array([1e5, 2e5, 4e5, 8e5, 16e5, 1e5, 4e5, 16e5, 2e5, 8e5])
D = np.array([1e6, 1e6, 2e6, 2e6, 4e6, 8e6, 8e6, 8e6, 32e6, 32e6])
PUBLISHED = ChinchillaLaw(1.69, 406.4, 0.34, 410.7, 0.28)
"""Hoffmann et al., approach 3."""


def test_a_line_in_logarithms_is_kaplans_law():
    law = fit_power_law(N, PowerLaw(8.0, 0.076)(N))
    assert (law.scale, law.exponent, law.floor) == pytest.approx((8.0, 0.076, 0))


def test_a_floor_is_found():
    law = fit_with_floor(D, PowerLaw(300.0, 0.3, 1.8)(D))
    assert (law.exponent, law.floor) == pytest.approx((0.3, 1.8), rel=1e-3)


def test_the_two_terms_of_chinchilla_are_found_and_predict_a_larger_model():
    law = fit_chinchilla(N, D, PUBLISHED(N, D))
    assert (law.alpha, law.beta, law.floor) == pytest.approx((0.34, 0.28, 1.69), rel=0.05)
    assert law(1e8, 2e9) == pytest.approx(PUBLISHED(1e8, 2e9), rel=0.01)


def test_the_best_model_of_a_budget_is_the_minimum_on_its_curve():
    for flops in (1e15, 5.76e23):
        parameters, tokens = PUBLISHED.best(flops)
        assert 6 * parameters * tokens == pytest.approx(flops)
        around = PUBLISHED(parameters * np.array([0.9, 1.0, 1.1]), tokens / np.array([0.9, 1.0, 1.1]))
        assert around.argmin() == 1


def test_an_interval_holds_the_truth_and_shrinks_with_the_noise():
    noise = np.random.default_rng(1).normal(size=len(N))
    widths = []
    for scale in (0.03, 0.003):
        losses = PowerLaw(8.0, 0.076)(N) * np.exp(scale * noise)
        low, high = bootstrap(fit_power_law, (N, losses), lambda law: float(law(1e7)), draws=100)
        assert low < PowerLaw(8.0, 0.076)(1e7) < high
        widths.append(high - low)
    assert widths[0] > 5 * widths[1]


def test_bad_runs_name_the_cure():
    with pytest.raises(UserError, match="4 runs determine no law of this form: give at least 5"):
        fit_chinchilla(N[:4], D[:4], N[:4])
    with pytest.raises(UserError, match="leave out runs that diverged"):
        fit_power_law([1, 2], [3, float("nan")])
    with pytest.raises(UserError, match="one value of each for every run"):
        fit_power_law([1, 2], [3.0])
    with pytest.raises(UserError, match="give more runs"):
        bootstrap(fit_power_law, ([1.0, 1.0], [2.0, 2.0]), lambda law: law.scale, draws=1, seed=0)
