"""A Gaussian process: a distribution over functions, made sure at the points that were measured and unsure away from them.

Two values are as alike as their points are near, by the squared-exponential kernel; measured values y at the points X then give a mean and
a standard deviation at every other point:

    k(x, x') = v exp(-|x - x'|^2 / 2 l^2)        K = k(X, X) + n I
    mean(x)  = k(x, X) K^-1 y                    var(x) = k(x, x) - k(x, X) K^-1 k(X, x)
    log p(y) = -1/2 y^T K^-1 y - 1/2 log |K| - N/2 log 2 pi

Length scale l, variance v and noise n are those of the largest marginal likelihood p(y), which pays for the fit and charges for every
function that was possible and did not happen. C. E. Rasmussen and C. K. I. Williams, Gaussian Processes for Machine Learning (2006),
algorithm 2.1 and section 5.4. Cost: N^3 / 3 for the Cholesky factor of K, N^2 for each new point; N points of a search are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.errors import UserError

_JITTER = 1e-9  # of the variance: two equal points make K singular
_LENGTHS, _NOISES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (1e-6, 1e-3, 1e-1)
_ASCENT_STEPS = 25


@dataclass(frozen=True)
class Kernel:
    """Length scale (in units of the points), variance and noise variance (both of the squared unit of the values)."""

    length: float
    variance: float = 1.0
    noise: float = 0.0

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """k of every row of ``left`` (n, d) with every row of ``right`` (m, d): (n, m), without noise."""
        return _squared_exponential(left, right, _scalar(self.length), _scalar(self.variance))


@dataclass(frozen=True)
class GaussianProcess:
    """A kernel, the points (N, d) and values (N,) that it was told, all fp64. Made by :meth:`of` or :func:`fit`."""

    kernel: Kernel
    points: Tensor
    values: Tensor
    factor: Tensor
    """The Cholesky factor of K, (N, N), lower."""

    @classmethod
    def of(cls, kernel: Kernel, points: Tensor, values: Tensor) -> GaussianProcess:
        """The process that has seen ``values`` (N,) at ``points`` (N, d), N at least 1.

        Raises:
            UserError: the sizes do not agree, or a value is not finite.
        """
        points, values = points.double(), values.double()
        if points.dim() != 2 or values.shape != points.shape[:1] or not len(values):
            raise UserError(f"points {tuple(points.shape)} and values {tuple(values.shape)}: give (N, d) and (N,), N at least 1")
        if not bool(values.isfinite().all() & points.isfinite().all()):
            raise UserError("a Gaussian process cannot learn from NaN or infinity: leave such trials out, or give them a bad finite value")
        covariance = _with_noise(kernel.between(points, points), _scalar(kernel.variance), _scalar(kernel.noise))
        return cls(kernel, points, values, torch.linalg.cholesky(covariance))

    def predict(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (M,) of the function, noise not counted, at ``points`` (M, d)."""
        across = self.kernel.between(self.points, points.double())
        mean = across.T @ torch.cholesky_solve(self.values[:, None], self.factor)[:, 0]
        explained = torch.linalg.solve_triangular(self.factor, across, upper=False).square().sum(0)
        return mean, (self.kernel.variance - explained).clamp(min=0).sqrt()

    @property
    def log_likelihood(self) -> float:
        """log p(y): how probable the values are under this kernel."""
        return float(_log_likelihood(self.factor, self.values))


def fit(points: Tensor, values: Tensor) -> GaussianProcess:
    """The process whose kernel makes ``values`` (N,) at ``points`` (N, d) most probable.

    A few starts, then L-BFGS on the logarithms of length, variance and noise. Points should lie in the unit cube and values have mean 0 and
    standard deviation 1, which is what the starts and the bounds (lengths 0.01 to 10, noise from 1e-8) are for.
    """
    points, values = points.double(), values.double()
    with _one_thread():
        return _most_probable(points, values)


def _most_probable(points: Tensor, values: Tensor) -> GaussianProcess:
    candidates = [Kernel(length, 1.0, noise) for length in _LENGTHS for noise in _NOISES]
    start = max(candidates, key=lambda kernel: GaussianProcess.of(kernel, points, values).log_likelihood)
    logs = torch.tensor([start.length, start.variance, start.noise], dtype=torch.float64).log().requires_grad_()
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
    return max((GaussianProcess.of(kernel, points, values) for kernel in (found, start)), key=lambda process: process.log_likelihood)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices of a search are small: a team of threads was seen to take 30 times as long over them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _squared_exponential(left: Tensor, right: Tensor, length: Tensor, variance: Tensor) -> Tensor:
    apart = (left[:, None, :] - right[None, :, :]).square().sum(-1)
    return variance * torch.exp(-apart / (2 * length.square()))


def _with_noise(covariance: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    return covariance + (noise + _JITTER * variance) * torch.eye(len(covariance), dtype=torch.float64)


def _log_likelihood(factor: Tensor, values: Tensor) -> Tensor:
    whitened = torch.linalg.solve_triangular(factor, values[:, None], upper=False)
    return -0.5 * whitened.square().sum() - factor.diagonal().log().sum() - 0.5 * len(values) * math.log(2 * math.pi)


def _bounded(logs: Tensor) -> Tensor:
    low = torch.tensor([0.01, 0.01, 1e-8], dtype=torch.float64).log()
    high = torch.tensor([10.0, 100.0, 1.0], dtype=torch.float64).log()
    return torch.clamp(logs, low, high).exp()
