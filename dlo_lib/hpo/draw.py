"""Figures of a search: the losses of each trial over its resource, and the tasks of each worker over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlo_lib.base.drawing import new_figure
from dlo_lib.hpo.simulate import SimulatedSearch
from dlo_lib.hpo.table import TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STOPPED, _FURTHEST, _FIRST = "#a6a6a6", "#c25000", "#13589a"


def draw_trials(table: Sequence[TrialRow], *, resource: str = "epochs", title: str = "") -> Figure:
    """Draw one line for each trial, from rung to rung, on a logarithmic axis; the trials trained furthest are
    in colour.
    """
    figure = new_figure(8, 3.8)
    axes = figure.subplots()
    most = max((max(row.reports) for row in table if row.reports), default=0)
    for row in table:
        is_last = most in row.reports
        colour, width = (_FURTHEST, 2) if is_last else (_STOPPED, 1)
        axes.plot(
            list(row.reports),
            list(row.reports.values()),
            marker="o",
            ms=4,
            color=colour,
            lw=width,
            zorder=2 + width,
        )
    resources = sorted({each for row in table for each in row.reports})
    axes.set_xscale("log")
    axes.set_xticks(resources, [str(each) for each in resources], minor=False)
    axes.set_xticks([], minor=True)
    axes.set(xlabel=resource, ylabel="loss")
    trained = sum(max(row.reports, default=0) for row in table if row.parent is None)
    axes.set_title(
        title or f"{len(table)} trials, {trained} {resource} in all; in colour: trained furthest",
        loc="left",
        fontsize=10,
    )
    _style(axes)
    return figure


def draw_timeline(runs: dict[str, SimulatedSearch]) -> Figure:
    """Draw the tasks of each worker over time, one chart for each named run.

    A bar is a task; it is darker for a larger resource. White space is time in which a worker waits.
    """
    workers = sum(max(span.worker for span in run.spans) + 1 for run in runs.values())
    figure = new_figure(10, 0.35 * workers + 0.9 * len(runs))
    charts = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(charts, runs.items()):
        resources = sorted({span.resource for span in run.spans})
        for span in run.spans:
            shade = 0.25 + 0.75 * resources.index(span.resource) / max(1, len(resources) - 1)
            axes.barh(
                span.worker,
                span.end - span.start,
                left=span.start,
                height=0.8,
                color=_FIRST,
                alpha=shade,
                ec="white",
                lw=0.6,
            )
        count = max(span.worker for span in run.spans) + 1
        busy = run.cost / (run.makespan * count)
        axes.set_yticks(range(count), [f"worker {worker}" for worker in range(count)], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(
            f"{name}: ends at {run.makespan:.0f}, workers busy {100 * busy:.0f} % of the time",
            loc="left",
            fontsize=10,
        )
        axes.spines[["top", "right"]].set_visible(False)
    charts[-1].set_xlabel("time")
    return figure


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
