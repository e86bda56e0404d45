"""Figures of learning-rate schedules and of range tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dlo_lib.base.drawing import new_figure, whole_numbers
from dlo_lib.base.errors import UserError
from dlo_lib.optim.finder import RangeTest
from dlo_lib.optim.schedules import LRSchedule, MomentumSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = (
    ("#13589a", "-"), ("#c25000", "--"), ("#0e8256", "-."), ("#ae4a90", ":"), ("#6b4a00", "-"),
    ("#f1a208", "--"), ("#666666", "-."),
)  # fmt: skip
"""Colour and line style of each curve; the line styles distinguish the curves without colours."""


def draw_schedules(schedules: Mapping[str, LRSchedule], steps: int) -> Figure:
    """Draw the factor of each schedule over ``steps`` steps, and below it the momentum of the schedules that
    have one.
    """
    with_momentum = {
        name: schedule for name, schedule in schedules.items() if isinstance(schedule, MomentumSchedule)
    }
    figure = new_figure(9, 5.2 if with_momentum else 3.4)
    panels = figure.subplots(
        2 if with_momentum else 1,
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[2, 1] if with_momentum else [1],
    )[:, 0]
    for number, (name, schedule) in enumerate(schedules.items()):
        colour, dashes = STYLES[number % len(STYLES)]
        panels[0].plot([schedule(step) for step in range(steps)], color=colour, linestyle=dashes, label=name)
        if name in with_momentum:
            panels[1].plot(
                [with_momentum[name].momentum(step) for step in range(steps)], color=colour, linestyle=dashes
            )
    panels[0].set(ylabel="learning rate / peak", ylim=(-0.03, 1.05))
    panels[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    if with_momentum:
        panels[1].set(ylabel="momentum")
    panels[-1].set(xlabel="step")
    whole_numbers(panels[-1])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def draw_range_test(test: RangeTest) -> Figure:
    """Draw the losses and the smoothed curve over the learning rate, with the suggested learning rates."""
    figure = new_figure(9, 3.6)
    axes = figure.subplots()
    curve = test.smoothed
    axes.plot(test.lrs, test.losses, color="#bbbbbb", linewidth=1, label="loss")
    axes.plot(test.lrs, curve, color=STYLES[0][0], linewidth=2, label="smoothed")
    axes.set_xscale("log")
    least = min((loss for loss in curve if math.isfinite(loss)), default=math.nan)
    if (span := curve[0] - least) > 0:  # a diverged loss on the axis would hide the rest of the curve
        axes.set_ylim(min(least, *test.losses) - 0.1 * span, curve[0] + 0.7 * span)
    try:
        found = test.suggestion()
    except UserError as error:
        axes.set_title(str(error), fontsize=9)
    else:
        marks = {
            "begins to fall": found.begins,
            "falls fastest": found.steepest,
            "peak to use": found.peak,
            "stops falling": found.bottom,
        }
        for (name, lr), (colour, dashes) in zip(marks.items(), STYLES[1:]):
            axes.axvline(lr, color=colour, linestyle=dashes, label=f"{name}: {lr:.2g}")
        axes.set_title(found.reason, fontsize=9)
    axes.set(xlabel="learning rate", ylabel="loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
