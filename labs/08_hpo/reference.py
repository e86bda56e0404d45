"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

import math

import torch
from optuna.distributions import FloatDistribution
from torch import Tensor

from dlo_lib.hpo import asha, halving, population
from dlo_lib.hpo.expected_improvement import expected_improvement
from dlo_lib.hpo.expected_improvement_sampler import from_unit
from dlo_lib.hpo.gaussian_process import GaussianProcess, Kernel
from dlo_lib.hpo.table import GoOn, Row

LENGTHS, NOISE = [0.05, 0.1, 0.2, 0.4, 0.8], 1e-4


def from_place(place: float, low: float, high: float, log: bool) -> float:
    """The value at a place of a distribution."""
    return float(from_unit(place, FloatDistribution(low, high, log=log)))


def interval(left: Tensor, right: Tensor, chosen: Tensor, level: float) -> tuple[float, float]:
    """The bootstrap of the paired differences."""
    means = (left - right)[chosen].mean(1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=means.dtype)
    low, high = torch.quantile(means, ends).tolist()
    return low, high


def posterior(points: Tensor, values: Tensor, new: Tensor, length: float, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the process."""
    return GaussianProcess.of(Kernel(length, 1.0, noise), points, values).predict(new)


def best_length(points: Tensor, values: Tensor, lengths: list[float], noise: float) -> float:
    """The most probable length scale."""
    return max(lengths, key=lambda length: GaussianProcess.of(Kernel(length, 1.0, noise), points, values).log_likelihood)


def next_candidate(points: Tensor, values: Tensor, candidates: Tensor) -> int:
    """The candidate with the largest Expected Improvement."""
    scaled = (values - values.mean()) / values.std(correction=0)
    mean, std = posterior(points, scaled, candidates, best_length(points, scaled, LENGTHS, NOISE), NOISE)
    return int(expected_improvement(mean, std, float(scaled.min())).argmax())


def rungs(trials: int, least: int, most: int, eta: int) -> list[tuple[int, int]]:
    """The rungs of successive halving."""
    return [(rung.trials, rung.resource) for rung in halving.rungs(trials, least, most, eta)]


def survivors(losses: list[float], keep: int) -> list[int]:
    """The best trials."""
    return sorted(range(len(losses)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])[:keep]


def brackets(most: int, eta: int) -> list[tuple[int, int]]:
    """What the brackets of Hyperband begin with."""
    return [(bracket[0].trials, bracket[0].resource) for bracket in halving.brackets(most, eta)]


def promotion(reported: list[dict[int, float]], promoted: list[list[int]], eta: int) -> tuple[int, int] | None:
    """What the library's ASHA decides on a table of these trials: rung k is at eta^k."""
    top = len(reported) - 1
    policy = asha.Asha(trials=eta**top, least=1, most=eta**top, eta=eta)
    rows = []
    for trial in sorted({trial for rung in reported for trial in rung}):
        losses = {eta**k: rung[trial] for k, rung in enumerate(reported) if trial in rung}
        gone = [eta ** (k + 1) for k, trials in enumerate(promoted) if trial in trials and eta ** (k + 1) not in losses]
        rows.append(Row(trial, {}, eta**top, losses, goal=gone[-1] if gone else None))
    decision = policy.decide(rows)
    if not isinstance(decision, GoOn):
        return None
    return decision.trial, [eta**k for k in range(top + 1)].index(decision.resource) - 1


def should_stop(losses: list[float], others: list[list[float]], warmup: int, enough: int) -> bool:
    """The median rule."""
    told = [other[len(losses) - 1] for other in others if len(other) >= len(losses)]
    if math.isnan(losses[-1]):
        return True
    if len(losses) <= warmup or len(told) < enough:
        return False
    return min(losses) > float(torch.quantile(torch.tensor(told, dtype=torch.float64), 0.5))


def new_generation(
    losses: list[float], rates: list[float], quantile: float, picks: list[int], ups: list[bool], low: float, high: float
) -> tuple[list[int], list[float]]:
    """Exploit and explore."""
    ranked, few = survivors(losses, len(losses)), max(1, int(quantile * len(losses)))
    parents = {member: ranked[picks[member]] for member in ranked[-few:]}
    factors = population.FACTORS
    changed = [
        min(high, max(low, rates[parents[member]] * factors[ups[member]])) if member in parents else rate
        for member, rate in enumerate(rates)
    ]
    return [parents.get(member, member) for member in range(len(losses))], changed


REFERENCE = {
    "scale": {"from_place": from_place},
    "interval": {"interval": interval},
    "process": {"posterior": posterior},
    "improvement": {"expected_improvement": expected_improvement},
    "length": {"best_length": best_length},
    "next": {"next_candidate": next_candidate},
    "halving": {"rungs": rungs, "survivors": survivors},
    "hyperband": {"brackets": brackets},
    "asha": {"promotion": promotion},
    "prune": {"should_stop": should_stop},
    "population": {"new_generation": new_generation},
}
