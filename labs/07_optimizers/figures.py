"""The figures of this lab. They compute only means and shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dlo_lib.labkit.figures import BLACK, METHODS, MUTED, finish, legend, panels, styled
from dlo_lib.labkit.predictions import Predicted, mark_predicted

Point = tuple[float, float]


@styled
def valley(paths: Mapping[str, Sequence[Point]], curvature: float) -> Figure:
    """Paths of optimisers through a narrow valley, over the contours of the loss."""
    (axes,) = panels(width=9, height=3.6)
    xs = [-2 + 14 * k / 80 for k in range(81)]
    ys = [-2 + 4 * k / 80 for k in range(81)]
    loss = [[(x * x + curvature * y * y) / 2 for x in xs] for y in ys]
    axes.contour(xs, ys, loss, levels=[1, 5, 15, 40, 80], colors=MUTED, linewidths=0.8)
    for (name, path), style in zip(paths.items(), METHODS):
        axes.plot(*zip(*path), **style.line(marked=True), markersize=3, linewidth=1.2, label=name)
    axes.plot([0], [0], marker="*", color=BLACK, markersize=12, linestyle="", label="minimum")
    legend(axes, "below", ncols=3)
    return finish(axes, None, xlabel="flat direction", ylabel="steep direction", xlim=(-2, 12), ylim=(-2, 2))


@styled
def lines(series: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> Figure:
    """Values over their numbers, from 1, a line per name, on a logarithmic axis."""
    (axes,) = panels()
    for (name, line), style in zip(series.items(), METHODS):
        few = sum(map(math.isfinite, line)) < 40  # a run that diverges can have a single point
        axes.plot(range(1, len(line) + 1), line, **style.line(marked=few), label=name)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    legend(axes, "right")
    return finish(axes, "both", xlabel=xlabel, ylabel=ylabel)


@styled
def runs(accuracies: Mapping[str, Sequence[float]], title: str, predicted: Predicted) -> Figure:
    """Test accuracy of each run as a point and the mean as a bar, a row per optimiser and a panel per batch.

    ``accuracies``: under "optimiser, batch"; ``predicted``: in percent, under the same names.
    """
    batches = list(dict.fromkeys(name.rpartition(", ")[2] for name in accuracies))
    all_axes = panels(len(batches), width=10, height=1.6 + 0.36 * len(accuracies) / len(batches))
    for axes, batch in zip(all_axes, batches):
        names = [name for name in accuracies if name.endswith(f", {batch}")]
        for row, (name, style) in enumerate(zip(names, METHODS)):
            percent = [100 * value for value in accuracies[name]]
            axes.plot(percent, [row] * len(percent), **style.points(), alpha=0.6)
            mean = sum(percent) / len(percent)
            axes.plot([mean, mean], [row - 0.35, row + 0.35], color=style.colour, linewidth=3)
        guesses = {name: predicted[name] for name in names if name in predicted}
        mark_predicted(axes, {name: row for row, name in enumerate(names)}, guesses, horizontal=True)
        legend(axes, "below")
        axes.set_yticks(range(len(names)), names)
        axes.locator_params(axis="x", nbins=5)
        axes.set_ylim(len(names) - 0.4, -0.6)
        finish(axes, "both", xlabel="test accuracy (%)", title=title)
    return all_axes[0].get_figure()


@styled
def landscapes(surfaces: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]) -> Figure:
    """Loss around trained weights, on a plane of two filter-normalised directions, a panel per model."""
    all_axes = panels(len(surfaces), width=5.2 * len(surfaces), height=4.2)
    levels = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]
    for axes, (name, (places, loss)) in zip(all_axes, surfaces.items()):
        lines = axes.contour(places, places, loss, levels=levels, cmap="viridis", linewidths=1.4)
        axes.clabel(lines, fontsize=9)
        axes.plot([0], [0], marker="*", color=BLACK, markersize=12, linestyle="")
        axes.set_title(name)
        finish(axes, None, xlabel="first direction (1: norm of a filter)", ylabel="second direction")
    return all_axes[0].get_figure()
