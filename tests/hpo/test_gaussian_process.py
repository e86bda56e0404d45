"""The Gaussian process against scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.hpo.gaussian_process import GaussianProcess, Kernel, fit
from tests.lazy import Lazy

gaussian_process = Lazy("sklearn.gaussian_process")
kernels = Lazy("sklearn.gaussian_process.kernels")


def measured(count: int, dimensions: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(count, dimensions, generator=generator, dtype=torch.float64)
    values = torch.sin(5 * points).sum(1) + 0.05 * torch.randn(
        count, generator=generator, dtype=torch.float64
    )
    return points, (values - values.mean()) / values.std(correction=0)


def peer(kernel: Kernel, points: torch.Tensor, values: torch.Tensor) -> Any:
    theirs = kernels.ConstantKernel(kernel.variance) * kernels.RBF(kernel.length)
    return gaussian_process.GaussianProcessRegressor(
        theirs, alpha=kernel.noise + 1e-9 * kernel.variance, optimizer=None
    ).fit(points, values)


@pytest.mark.parametrize(("count", "dimensions"), [(2, 1), (7, 1), (12, 2), (30, 5)])
def test_mean_deviation_and_likelihood_equal_those_of_scikit_learn(count, dimensions):
    points, values = measured(count, dimensions)
    kernel = Kernel(length=0.37, variance=1.7, noise=0.02)
    ours, theirs = GaussianProcess.of(kernel, points, values), peer(kernel, points, values)
    new, _ = measured(50, dimensions, seed=1)
    mean, std = ours.predict(new)
    their_mean, their_std = theirs.predict(new, return_std=True)
    np.testing.assert_allclose(mean, their_mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(std, their_std, rtol=1e-6, atol=1e-8)
    assert ours.log_likelihood == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-9)


def test_without_noise_the_deviation_is_zero_at_the_measured_points_only():
    points, values = measured(6, 1)
    process = GaussianProcess.of(Kernel(0.2), points, values)
    mean, std = process.predict(points)
    assert torch.allclose(mean, values, atol=1e-5)
    assert float(std.max()) < 1e-3
    far, deviation = process.predict(torch.tensor([[9.0]]))
    assert float(far) == pytest.approx(0, abs=1e-9)
    assert float(deviation) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_fitted_kernel_is_as_likely_as_that_of_scikit_learn(seed):
    points, values = measured(20, 2, seed)
    ours = fit(points, values)
    bounded = kernels.ConstantKernel(1.0, (0.01, 100)) * kernels.RBF(0.3, (0.01, 10))
    theirs = gaussian_process.GaussianProcessRegressor(
        bounded, alpha=ours.kernel.noise, n_restarts_optimizer=5, random_state=0
    ).fit(points, values)
    assert ours.log_likelihood >= theirs.log_marginal_likelihood_value_ - 0.05


def test_the_length_scale_follows_the_function():
    points = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
    slow, fast = (fit(points, torch.sin(turns * points[:, 0])).kernel.length for turns in (4, 30))
    assert slow > 3 * fast


def test_equal_points_and_constant_values_give_finite_predictions():
    points = torch.tensor([[0.5], [0.5], [0.2]], dtype=torch.float64)
    mean, std = fit(points, torch.zeros(3)).predict(torch.rand(9, 1))
    assert bool((mean.isfinite() & std.isfinite()).all())


@pytest.mark.parametrize("values", [torch.tensor([1.0, float("nan")]), torch.tensor([1.0])])
def test_wrong_shapes_and_nan_raise(values):
    with pytest.raises(UserError):
        GaussianProcess.of(Kernel(0.2), torch.rand(2, 1), values)
