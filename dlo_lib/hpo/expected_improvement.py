"""Expected Improvement: the expected amount by which the value at a point improves on the best value so far.

A model predicts that the value at x is normal with mean m and standard deviation s. Let ``best`` be the
lowest value measured so far. Then

    z = (best - m) / s        EI(x) = E[max(best - f(x), 0)] = (best - m) Phi(z) + s phi(z)

where Phi is the distribution function of the standard normal and phi is its density. The first term rewards a
low mean (exploitation), the second a high uncertainty (exploration). Where s is 0, EI is max(best - m, 0).
The next measurement is taken where EI is largest.

J. Mockus (1975); D. R. Jones, M. Schonlau and W. J. Welch, Efficient Global Optimization of Expensive
Black-Box Functions (1998), doi:10.1023/A:1008306431147. Cost: one prediction of the model for each candidate
point."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.hpo.gaussian_process import fit


def expected_improvement(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """Compute EI (M,) from ``mean`` (M,) and ``std`` (M,), for a search that minimises."""
    gain = best - mean
    z = gain / std.clamp(min=torch.finfo(std.dtype).tiny)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    uncertain = gain * torch.special.ndtr(z) + std * density
    return torch.where(std > 0, uncertain.clamp(min=0), gain.clamp(min=0))


def most_promising(
    points: Tensor, values: Tensor, *, seed: int, candidates: int = 1024, near: int = 256
) -> Tensor:
    """Return the point (d,) of the unit cube with the largest EI, given ``values`` (N,) at ``points`` (N, d).

    A Gaussian process is fitted to the standardised values. EI has many local maxima with flat regions
    between them, and it is cheap to evaluate. It is therefore evaluated at ``candidates`` points of a
    scrambled Sobol sequence and at ``near`` points close to the best measured point."""
    values = values.double()
    scaled = (values - values.mean()) / values.std(correction=0).clamp(min=1e-12)
    process = fit(points, scaled)
    dimensions = points.shape[1]
    generator = torch.Generator().manual_seed(seed)
    spread = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed).draw(
        candidates, dtype=torch.float64
    )
    steps = torch.randn(near, dimensions, generator=generator, dtype=torch.float64) / 30
    considered = torch.cat([spread, (points[scaled.argmin()].double() + steps).clamp(0, 1)])
    mean, std = process.predict(considered)
    return considered[expected_improvement(mean, std, float(scaled.min())).argmax()]
