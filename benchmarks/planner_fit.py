"""Fits the constants of the planner's ``Stack`` to published runs, and tests them on runs that were left out.

Three of the five constants are fitted by least squares of the squared error, which weighs the largest error
most; ``depth`` and ``links`` are fixed within their bounds, because ten runs do not separate them from the
others. Leave-one-out fits the constants to nine runs and predicts the tenth.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.planner_published import PublishedRun, errors
from dlo_lib.planner import MEGATRON, Stack
from dlo_lib.planner.plans import Array
from dlo_lib.planner.stack import BOUNDS

FITTED = ("matmul", "memory", "sends")


def fit(runs: tuple[PublishedRun, ...], start: Stack = MEGATRON, rounds: int = 8) -> Stack:
    """Return the stack with the constants ``FITTED`` to ``runs``: Gauss-Newton on the squared errors, within
    ``BOUNDS``."""
    low, high = np.array([BOUNDS[name] for name in FITTED]).T
    values = np.array([getattr(start, name) for name in FITTED])

    def stack_of(found: Array) -> Stack:
        matmul, memory, sends = map(float, found)
        return replace(start, matmul=matmul, memory=memory, sends=sends)

    def residuals(found: Array) -> Array:
        points = errors(runs, stack_of(found))
        return points * np.abs(points)

    best = residuals(values)
    for _ in range(rounds):
        steps = 1e-3 * (high - low)
        slopes = np.stack(
            [
                (residuals(values + step * unit) - best) / step
                for step, unit in zip(steps, np.eye(len(FITTED)))
            ]
        )
        scaled = slopes * (high - low)[:, None]
        damped = scaled @ scaled.T + 1e-3 * np.eye(len(FITTED)) * np.trace(scaled @ scaled.T)
        move = -np.linalg.solve(damped, scaled @ best) * (high - low)
        for shorter in (1.0, 0.3, 0.1):
            tried = np.clip(values + shorter * move, low, high)
            if (found := residuals(tried)) @ found < best @ best:
                values, best = tried, found
                break
        else:
            break
    return stack_of(values)


def leave_one_out(runs: tuple[PublishedRun, ...], start: Stack = MEGATRON) -> Array:
    """Return the error of each run, in points, of constants that are fitted to the others."""
    found = []
    for index, run in enumerate(runs):
        others = runs[:index] + runs[index + 1 :]
        found.append(run.error(fit(others, start, rounds=4)))
    return np.array(found)
