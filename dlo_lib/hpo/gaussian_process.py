"""Gaussian process regression with a squared-exponential kernel.

A Gaussian process is a distribution over functions. The kernel gives the covariance of the values at two
points from their distance. Given measured values y at the points X, the process predicts a mean and a
standard deviation at every other point; the standard deviation is small near the measured points and grows
away from them:

    k(x, x') = v exp(-|x - x'|^2 / 2 l^2)        K = k(X, X) + n I
    mean(x)  = k(x, X) K^-1 y                    var(x) = k(x, x) - k(x, X) K^-1 k(X, x)
    log p(y) = -1/2 y^T K^-1 y - 1/2 log |K| - N/2 log 2 pi

The length scale l, the variance v and the noise n maximise the marginal likelihood p(y), which rewards a good
fit and penalises a complex model. C. E. Rasmussen and C. K. I. Williams, Gaussian Processes for Machine
Learning (2006), algorithm 2.1 and section 5.4. Cost: N^3 / 3 for the Cholesky factor of K and N^2 for each
new point. N is small in a search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.base.one_thread import one_torch_thread

_JITTER = 1e-9  # times the variance, added to the diagonal because two equal points make K singular
_LENGTHS, _NOISES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (1e-6, 1e-3, 1e-1)
_ASCENT_STEPS = 25


@dataclass(frozen=True)
class Kernel:
    """Length scale (in the unit of the points), variance and noise variance (both in the squared unit of the
    values).
    """

    length: float
    variance: float = 1.0
    noise: float = 0.0

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute the covariance (n, m) of the rows of ``left`` (n, d) and ``right``
        (m, d), without noise."""
        return _squared_exponential(left, right, _scalar(self.length), _scalar(self.variance))


@dataclass(frozen=True)
class GaussianProcess:
    """A kernel with the measured points (N, d) and values (N,), in fp64.

    Create one with :meth:`of` or :func:`fit`.
    """

    kernel: Kernel
    points: Tensor
    values: Tensor
    factor: Tensor
    """The lower Cholesky factor (N, N) of K."""

    @classmethod
    def of(cls, kernel: Kernel, points: Tensor, values: Tensor) -> GaussianProcess:
        """Condition the process on ``values`` (N,) at ``points`` (N, d), with N >= 1.

        Raises:
            UserError: the shapes do not match, or a number is not finite.
        """
        points, values = points.double(), values.double()
        if points.dim() != 2 or values.shape != points.shape[:1] or not len(values):
            raise UserError(
                f"points {tuple(points.shape)} and values {tuple(values.shape)}: "
                "pass (N, d) and (N,) with N >= 1"
            )
        if not bool(values.isfinite().all() & points.isfinite().all()):
            raise UserError(
                "a Gaussian process needs finite values: leave out the trials with NaN or infinity"
            )
        covariance = _with_noise(
            kernel.between(points, points), _scalar(kernel.variance), _scalar(kernel.noise)
        )
        return cls(kernel, points, values, torch.linalg.cholesky(covariance))

    def predict(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the mean (M,) and the standard deviation (M,) of the function, without noise, at ``points``
        (M, d).
        """
        across = self.kernel.between(self.points, points.double())
        mean = across.T @ torch.cholesky_solve(self.values[:, None], self.factor)[:, 0]
        explained = torch.linalg.solve_triangular(self.factor, across, upper=False).square().sum(0)
        return mean, (self.kernel.variance - explained).clamp(min=0).sqrt()

    @property
    def log_likelihood(self) -> float:
        """The log marginal likelihood log p(y) of the values under this kernel."""
        return float(_log_likelihood(self.factor, self.values))


def fit(points: Tensor, values: Tensor) -> GaussianProcess:
    """Fit the kernel that maximises the marginal likelihood of ``values`` (N,) at ``points`` (N, d).

    The best of a few starting points is refined with L-BFGS on the logarithms of length, variance and noise.
    The points should lie in the unit cube, and the values should have mean 0 and standard deviation 1,
    because the starting points and the bounds (length 0.01 to 10, variance 0.01 to 100, noise 1e-8 to 1)
    assume it."""
    points, values = points.double(), values.double()
    with one_torch_thread():
        return _most_probable(points, values)


def _most_probable(points: Tensor, values: Tensor) -> GaussianProcess:
    candidates = [Kernel(length, 1.0, noise) for length in _LENGTHS for noise in _NOISES]
    start = max(candidates, key=lambda kernel: GaussianProcess.of(kernel, points, values).log_likelihood)
    logs = (
        torch.tensor([start.length, start.variance, start.noise], dtype=torch.float64).log().requires_grad_()
    )
    search = torch.optim.LBFGS([logs], lr=0.5, max_iter=_ASCENT_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        length, variance, noise = _bounded(logs)
        covariance = _with_noise(_squared_exponential(points, points, length, variance), variance, noise)
        value = -_log_likelihood(torch.linalg.cholesky(covariance), values)
        value.backward()
        return value

    search.step(loss)
    with torch.no_grad():
        found = Kernel(*_bounded(logs).tolist()) if bool(logs.isfinite().all()) else start
    return max(
        (GaussianProcess.of(kernel, points, values) for kernel in (found, start)),
        key=lambda process: process.log_likelihood,
    )


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _squared_exponential(left: Tensor, right: Tensor, length: Tensor, variance: Tensor) -> Tensor:
    apart = (left[:, None, :] - right[None, :, :]).square().sum(-1)
    return variance * torch.exp(-apart / (2 * length.square()))


def _with_noise(covariance: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    return covariance + (noise + _JITTER * variance) * torch.eye(len(covariance), dtype=torch.float64)


def _log_likelihood(factor: Tensor, values: Tensor) -> Tensor:
    whitened = torch.linalg.solve_triangular(factor, values[:, None], upper=False)
    return (
        -0.5 * whitened.square().sum()
        - factor.diagonal().log().sum()
        - 0.5 * len(values) * math.log(2 * math.pi)
    )


def _bounded(logs: Tensor) -> Tensor:
    low = torch.tensor([0.01, 0.01, 1e-8], dtype=torch.float64).log()
    high = torch.tensor([10.0, 100.0, 1.0], dtype=torch.float64).log()
    return torch.clamp(logs, low, high).exp()
