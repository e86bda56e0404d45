"""The references of the checks, which are the Gaussian process, rungs and brackets of the library, and their
random cases."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin
from dlo_lib.hpo.expected_improvement import expected_improvement
from dlo_lib.hpo.gaussian_process import GaussianProcess, Kernel

LENGTHS, NOISE = [0.05, 0.1, 0.2, 0.4, 0.8], 1e-4


@twin
def predicted(
    points: Tensor, values: Tensor, new: Tensor, length: float, noise: float
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the library's process."""
    return GaussianProcess.of(Kernel(length, 1.0, noise), points, values).predict(new)


@twin
def likelihoods(points: Tensor, values: Tensor, lengths: tuple[float, ...], noise: float) -> list[float]:
    """log p(values) for each length."""
    kernels = [Kernel(length, 1.0, noise) for length in lengths]
    return [GaussianProcess.of(kernel, points, values).log_likelihood for kernel in kernels]


@twin
def improvement(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """Expected Improvement."""
    return expected_improvement(mean, std, best)


@twin
def standing(points: Tensor, values: Tensor, candidates: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation at ``candidates`` with the most probable of LENGTHS, for ``values`` standardised by
    N - ``correction``."""
    scaled = standardised(values, correction)
    told = likelihoods(points, scaled, tuple(LENGTHS), NOISE)
    return predicted(points, scaled, candidates, LENGTHS[told.index(max(told))], NOISE)


@twin
def improvements(points: Tensor, values: Tensor, candidates: Tensor, correction: int) -> Tensor:
    """EI at ``candidates``, for ``values`` standardised by N - ``correction``."""
    best = float(standardised(values, correction).min())
    return expected_improvement(*standing(points, values, candidates, correction), best)


# -- known mistakes


@twin
def other_units(points: Tensor, values: Tensor, candidates: Tensor, correction: int) -> Tensor:
    """EI at ``candidates`` if only ``best`` is not standardised."""
    return expected_improvement(*standing(points, values, candidates, correction), float(values.min()))


def similarity(a: Tensor, b: Tensor, length: float) -> Tensor:
    """The kernel (A, B) between the points ``a`` (A, d) and ``b`` (B, d)."""
    return torch.exp(-torch.cdist(a, b).square() / (2 * length**2))


def flooded(
    points: Tensor, values: Tensor, new: Tensor, length: float, noise: float
) -> tuple[Tensor, Tensor]:
    """Mean and deviation if the noise is added to every entry of the kernel."""
    across = similarity(new, points, length)
    weights = across @ torch.linalg.pinv(similarity(points, points, length) + noise)
    return weights @ values, (1 - (weights * across).sum(1)).clamp(min=0).sqrt()


def density_of(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """The density of the normal distribution at z."""
    return torch.distributions.Normal(0.0, 1.0).log_prob((best - mean) / std).exp()


def squared_z(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """Expected Improvement with z divided by the variance."""
    z, normal = (best - mean) / std.square(), torch.distributions.Normal(0.0, 1.0)
    return (best - mean) * normal.cdf(z) + std * normal.log_prob(z).exp()


# -- random cases


def cube(t, count: int, dimensions: int) -> Tensor:
    """Points (count, dimensions) of the unit cube, fp64."""
    return (t.integers(0, 10**6, count, dimensions).double() + 0.5) / (10**6 + 1)


def wavy(t, points: Tensor) -> Tensor:
    """Standardised values of a smooth function at ``points``."""
    place = points @ t.normal(points.shape[1], dtype=torch.float64)
    waves = torch.sin(t.uniform(2, 6) * place + t.uniform(0, 6))
    return standardised(waves + t.uniform(-1, 1) * points[:, 0], 0)


def standardised(values: Tensor, correction: int) -> Tensor:
    """Values with mean 0 and standard deviation 1, the squares divided by N - ``correction``."""
    return (values - values.mean()) / values.std(correction=correction)
