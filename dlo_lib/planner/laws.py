"""Scaling laws fitted to measured runs, with bootstrap intervals, and the best model for a budget.

    power law    L(x) = (x0 / x)^alpha                  Kaplan et al., arXiv:2001.08361: x = N, D or C
    with a floor L(x) = a x^(-alpha) + gamma            Hestness et al., arXiv:1712.00409
    two terms    L(N, D) = E + A / N^alpha + B / D^beta Hoffmann et al. (Chinchilla), arXiv:2203.15556

N parameters, D tokens, C = 6 N D FLOPs. Each law is linear in its coefficients once the exponents (and the
floor) are known, so a grid of exponents that is refined around its best point needs no optimiser: the
coefficients come from least squares at each point. Errors are those of log L, as Chinchilla's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlo_lib.base.errors import UserError, require_count

Array = NDArray[Any]
_REFINED = 12
"""How often a grid is refined, each time to a third of its width."""


@dataclass(frozen=True)
class PowerLaw:
    """L(x) = scale * x^(-exponent) + floor; ``floor`` is 0 in Kaplan's form."""

    scale: float
    exponent: float
    floor: float = 0.0

    def __call__(self, x: Any) -> Any:
        """Return the loss at ``x``, a number or an array."""
        return self.scale * np.asarray(x, float) ** -self.exponent + self.floor


@dataclass(frozen=True)
class ChinchillaLaw:
    """L(N, D) = floor + a / N^alpha + b / D^beta."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def __call__(self, parameters: Any, tokens: Any) -> Any:
        """Return the loss of ``parameters`` on ``tokens``, numbers or arrays."""
        of_model = self.a * np.asarray(parameters, float) ** -self.alpha
        return self.floor + of_model + self.b * np.asarray(tokens, float) ** -self.beta

    def best(self, flops: float) -> tuple[float, float]:
        """Return the parameters and the tokens of the smallest loss under 6 N D = ``flops`` (equation 4)."""
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = g * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / 6 / parameters


def _checked(losses: Any, least: int, *columns: Any) -> list[Array]:
    arrays = [np.asarray(column, float) for column in (losses, *columns)]
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise UserError("runs and losses differ in number: give one value of each for every run")
    if len(arrays[0]) < least:
        raise UserError(f"{len(arrays[0])} runs determine no law of this form: give at least {least}")
    if any((array <= 0).any() or not np.isfinite(array).all() for array in arrays):
        raise UserError("a size or a loss is 0, negative or not finite: leave out runs that diverged")
    return arrays


def fit_power_law(x: Any, losses: Any) -> PowerLaw:
    """Fit Kaplan's law: a line through log L against log x.

    Raises:
        UserError: there are fewer than 2 runs, or a value is not positive.
    """
    losses, x = _checked(losses, 2, x)
    slope, intercept = np.polyfit(np.log(x), np.log(losses), 1)
    return PowerLaw(float(np.exp(intercept)), float(-slope))


def fit_with_floor(x: Any, losses: Any) -> PowerLaw:
    """Fit Hestness's law, by a search for the floor below the smallest loss.

    Raises:
        UserError: there are fewer than 3 runs, or a value is not positive.
    """
    losses, x = _checked(losses, 3, x)

    def of_floor(floor: float) -> tuple[float, PowerLaw]:
        law = fit_power_law(x, losses - floor)
        law = PowerLaw(law.scale, law.exponent, floor)
        return float(((np.log(law(x)) - np.log(losses)) ** 2).sum()), law

    low, high = 0.0, float(losses.min()) * (1 - 1e-9)
    for _ in range(_REFINED):
        tried = np.linspace(low, high, 25)
        best = int(np.argmin([of_floor(floor)[0] for floor in tried]))
        low, high = tried[max(best - 1, 0)], tried[min(best + 1, 24)]
    return of_floor((low + high) / 2)[1]


def fit_chinchilla(parameters: Any, tokens: Any, losses: Any) -> ChinchillaLaw:
    """Fit the law of two terms. The coefficients are never negative.

    Raises:
        UserError: there are fewer than 5 runs, or a value is not positive.
    """
    losses, n, d = _checked(losses, 5, parameters, tokens)

    def of(alpha: float, beta: float) -> tuple[float, ChinchillaLaw]:
        columns = np.stack([np.ones_like(n), n**-alpha, d**-beta], 1)
        found = without_negatives(columns / losses[:, None], np.ones_like(losses))
        law = ChinchillaLaw(float(found[0]), float(found[1]), alpha, float(found[2]), beta)
        with np.errstate(divide="ignore"):
            return float(((np.log(law(n, d)) - np.log(losses)) ** 2).sum()), law

    ranges = [(0.02, 1.2), (0.02, 1.2)]
    alpha = beta = 0.3
    for _ in range(_REFINED):
        alphas, betas = (np.linspace(low, high, 9) for low, high in ranges)
        values = np.array([[of(one, two)[0] for two in betas] for one in alphas])
        row, column = np.unravel_index(values.argmin(), values.shape)
        alpha, beta = float(alphas[row]), float(betas[column])
        ranges = [
            (max(1e-3, middle - (high - low) / 4), middle + (high - low) / 4)
            for middle, (low, high) in zip((alpha, beta), ranges)
        ]
    return of(alpha, beta)[1]


def without_negatives(columns: Array, wanted: Array) -> Array:
    """Return the least-squares coefficients of ``columns`` of which none is negative: of all sets of columns
    whose own coefficients are not, those of the set that fits best."""
    size = np.linalg.norm(columns, axis=0)
    best, found = np.inf, np.zeros(columns.shape[1])
    for chosen in range(1, 1 << columns.shape[1]):
        kept = [index for index in range(columns.shape[1]) if chosen >> index & 1]
        solved = np.linalg.lstsq(columns[:, kept] / size[kept], wanted, rcond=None)[0] / size[kept]
        error = float(((columns[:, kept] @ solved - wanted) ** 2).sum())
        if (solved >= 0).all() and error < best - 1e-12:
            best, found = error, np.zeros(columns.shape[1])
            found[kept] = solved
    return found


def bootstrap(
    fit: Callable[..., Any],
    runs: tuple[Any, ...],
    value: Callable[[Any], float],
    draws: int = 200,
    seed: int = 0,
    level: float = 0.9,
) -> tuple[float, float]:
    """Return the interval of a value of a fitted law: the law is fitted to runs drawn with replacement.

    Args:
        fit: a function of this module.
        runs: its arguments; each has one value for every run.
        value: of a law, such as the loss of a larger model.
        level: the part of the draws inside the interval.

    Raises:
        UserError: ``draws`` is below 1, or every draw has too few different runs.
    """
    require_count("draws", draws)
    columns = [np.asarray(column, float) for column in runs]
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(draws):
        rows = draw.integers(len(columns[0]), size=len(columns[0]))
        if len(set(rows.tolist())) < min(len(columns[0]), len(columns) + 1):
            continue  # too few different runs determine nothing
        values.append(value(fit(*(column[rows] for column in columns))))
    if not values:
        raise UserError("no draw has enough different runs: give more runs")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
