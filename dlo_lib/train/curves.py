"""Curves of several runs in one figure, smoothed so that they can be compared.

The exponential mean, with the correction of Adam for its start at zero:

    m <- w m + (1 - w) x        shown: m / (1 - w^k) after k points

It is the smoothing of TensorBoard. It delays a curve by about w / (1 - w) points, so all curves of a figure
have the same w, and the values themselves stay visible behind them. Smoothing shows the course of one run; it
does not say whether the difference between two runs is more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dlo_lib.base.drawing import COLOURS, DASHES, new_figure, whole_numbers
from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.train.compare import RunScalars

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential means of ``values``, as many; values that are not finite have no influence.

    Args:
        weight: w, from 0 (no smoothing) to below 1.

    Raises:
        UserError: ``weight`` is out of range.
    """
    if not 0 <= weight < 1:
        raise UserError(f"the weight of the smoothing is {weight}: choose a number from 0 to below 1")
    mean, points, shown = 0.0, 0, []
    for value in values:
        if math.isfinite(value):
            mean, points = weight * mean + (1 - weight) * value, points + 1
        shown.append(mean / (1 - weight**points) if points else math.nan)
    return shown


def draw_curves(runs: Iterable[RunScalars], tag: str, weight: float = 0.9) -> Figure:
    """Draw the curve ``tag`` of each run that has it, smoothed with ``weight``, and its values in pale.

    Raises:
        UserError: no run has the curve, or ``weight`` is out of range.
    """
    every = list(runs)
    having = [run for run in every if run.scalars.get(tag)]
    if not having:
        raise unknown_name("curve", tag, {name for run in every for name in run.scalars})
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    for number, run in enumerate(having):
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        steps, values = zip(*run.scalars[tag])
        if weight:
            axes.plot(steps, values, color=colour, alpha=0.2)
        label = run.name if not run.missing or run.provenance is None else f"{run.name} (not reproducible)"
        axes.plot(steps, smoothed(values, weight), color=colour, linestyle=dashes, label=label)
    axes.set(xlabel="step", ylabel=tag)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    whole_numbers(axes)
    return figure
