"""Expected Improvement: how much lower than the best value so far the next one will be, on average over what is thought possible.

A model says that the value at x is normal with mean m and standard deviation s. With ``best`` the lowest value measured so far,

    z = (best - m) / s        EI(x) = E[max(best - f(x), 0)] = (best - m) Phi(z) + s phi(z)

with Phi and phi the normal distribution and its density. The first term pays for a low mean (exploit), the second for doubt (explore).
Where s is 0, EI is max(best - m, 0). Its largest value says where to measure next.

J. Mockus (1975); D. R. Jones, M. Schonlau and W. J. Welch, Efficient Global Optimization of Expensive Black-Box Functions (1998),
doi:10.1023/A:1008306431147. Cost: one prediction of the model for each point that is considered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.hpo.gaussian_process import fit


def expected_improvement(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """EI (M,) of points with that ``mean`` and ``std`` (M,), where lower than ``best`` is better."""
    gain = best - mean
    z = gain / std.clamp(min=torch.finfo(std.dtype).tiny)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    doubtful = gain * torch.special.ndtr(z) + std * density
    return torch.where(std > 0, doubtful.clamp(min=0), gain.clamp(min=0))


def most_promising(points: Tensor, values: Tensor, *, seed: int, candidates: int = 1024, near: int = 256) -> Tensor:
    """The point (d,) of the unit cube with the largest EI, after ``values`` (N,) at ``points`` (N, d).

    A Gaussian process is fitted to the standardised values. EI has many local maxima, flat land between them, and is cheap: it is
    looked up at ``candidates`` points of a scrambled Sobol sequence, and at ``near`` points close around the best one.
    """
    values = values.double()
    scaled = (values - values.mean()) / values.std(correction=0).clamp(min=1e-12)
    process = fit(points, scaled)
    dimensions = points.shape[1]
    generator = torch.Generator().manual_seed(seed)
    spread = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed).draw(candidates, dtype=torch.float64)
    steps = torch.randn(near, dimensions, generator=generator, dtype=torch.float64) / 30
    considered = torch.cat([spread, (points[scaled.argmin()].double() + steps).clamp(0, 1)])
    mean, std = process.predict(considered)
    return considered[expected_improvement(mean, std, float(scaled.min())).argmax()]
