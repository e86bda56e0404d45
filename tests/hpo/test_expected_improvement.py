"""Expected Improvement equals the mean of max(best - f, 0) by quadrature; a search
with it finds the minimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlo_lib.hpo.expected_improvement import expected_improvement, most_promising
from tests.lazy import Lazy

integrate, stats = Lazy("scipy.integrate"), Lazy("scipy.stats")


@pytest.mark.parametrize(
    ("mean", "std", "best"), [(0.0, 1.0, 0.0), (1.5, 0.3, 1.0), (-2.0, 0.7, -1.0), (3.0, 2.0, -1.5)]
)
def test_it_equals_the_mean_gain_by_quadrature(mean, std, best):
    want, _ = integrate.quad(
        lambda value: max(best - value, 0) * stats.norm.pdf(value, mean, std),
        mean - 12 * std,
        best,
        epsabs=1e-13,
    )
    got = expected_improvement(
        torch.tensor([mean], dtype=torch.float64), torch.tensor([std], dtype=torch.float64), best
    )
    assert float(got) == pytest.approx(want, rel=1e-7, abs=1e-12)


def test_without_uncertainty_it_is_the_certain_gain():
    got = expected_improvement(torch.tensor([2.0, 1.0, 0.25]), torch.zeros(3), best=1.0)
    assert got.tolist() == [0.0, 0.0, 0.75]


def test_it_grows_with_the_uncertainty_and_falls_with_the_mean():
    std = torch.linspace(0.1, 2, 20)
    assert bool((expected_improvement(torch.ones(20), std, 0.5).diff() > 0).all())
    assert bool((expected_improvement(torch.linspace(-1, 1, 20), torch.ones(20), 0.5).diff() < 0).all())


def test_far_above_the_best_it_is_zero_and_never_negative():
    got = expected_improvement(torch.tensor([50.0, 1e30]), torch.tensor([1.0, 1e-30]), best=0.0)
    assert got.tolist() == [0.0, 0.0]


def test_it_finds_the_minimum_of_a_parabola_in_a_few_steps():
    target = torch.tensor([0.3, 0.8], dtype=torch.float64)
    points = torch.rand(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for step in range(10):
        values = (points - target).square().sum(1)
        points = torch.cat([points, most_promising(points, values, seed=step)[None]])
    np.testing.assert_allclose(points[-1], target, atol=0.08)
