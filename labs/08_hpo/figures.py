"""The figures of this lab: landscapes, processes, comparisons, curves and populations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import trainings
from matplotlib.axes import Axes
from matplotlib.dates import date2num
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from dlo_lib.labkit.figures import (
    BLACK,
    BLUE,
    GREEN,
    METHODS,
    MUTED,
    SMALL,
    VERMILLION,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted


@styled
def landscape(searches: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Plot the landscape and the points of each search, with a tick for each learning rate that it tries."""
    side = 120
    ranges = (trainings.LEARNING_RATE, trainings.WEIGHT_DECAY)
    shares = [(i + 0.5) / side for i in range(side)]
    rates, decays = ([low * (high / low) ** share for share in shares] for low, high in ranges)
    losses = [[trainings.landscape(rate, decay) for rate in rates] for decay in decays]
    charts = panels(len(searches), width=11, height=4.2, sharey=True)
    for axes, (name, points) in zip(charts, searches.items()):
        mesh = axes.pcolormesh(rates, decays, losses, cmap="viridis", shading="nearest", rasterized=True)
        tried = [rates[min(side - 1, int(u * side))] for u, _ in points]
        weights = [decays[min(side - 1, int(v * side))] for _, v in points]
        axes.scatter(tried, weights, color="white", edgecolor=BLACK, s=40, zorder=3)
        below = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
        axes.plot(tried, [0.02] * len(tried), "|", color=BLACK, ms=14, mew=1.6, **below)
        title = f"{name}: {len(points)} trainings, {len({u for u, _ in points})} learning rates"
        figure = finish(axes, None, xscale="log", yscale="log", xlabel="learning rate", title=title)
    charts[0].set_ylabel("weight decay")
    figure.colorbar(mesh, ax=charts, label="loss")
    return figure


@styled
def best_losses(
    found: Mapping[str, Sequence[float]], label: str, predicted: Predicted, *, log: bool = False
) -> Figure:
    """Plot the best loss of every repeat as a dot, their median as a line, and predicted means, for each
    method."""
    (axes,) = panels(width=8, height=0.6 * len(found) + 1.2)
    spread = torch.Generator().manual_seed(0)
    for place, (losses, style) in enumerate(zip(found.values(), METHODS)):
        heights = place + 0.3 * (torch.rand(len(losses), generator=spread) - 0.5)
        axes.scatter(losses, heights, s=12, alpha=0.5, color=style.colour, marker=style.marker)
        axes.plot([sorted(losses)[len(losses) // 2]] * 2, [place - 0.3, place + 0.3], color=BLACK)
    mark_predicted(axes, {name: place for place, name in enumerate(found)}, predicted, horizontal=True)
    if axes.get_legend_handles_labels()[1]:
        legend(axes, "right")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    if log:
        axes.set_xscale("log")
        _plain_numbers(axes, "x")
    return finish(axes, "both", xlabel=f"{label} (points: repeats; line: their median)")


@styled
def improvement(
    line: Tensor,
    truth: Tensor,
    measured: tuple[Tensor, Tensor],
    pictures: Mapping[str, tuple[Tensor, Tensor, Tensor]],
) -> Figure:
    """Plot mean and uncertainty of the process above Expected Improvement, a column for each length scale."""
    columns = len(pictures)
    charts = panels(columns, 2, width=12, height=4.6, sharex=True, sharey="row", height_ratios=(2, 1))
    for above, below, (name, (mean, std, gain)) in zip(charts, charts[columns:], pictures.items()):
        above.plot(line, truth, color=MUTED, ls="--", lw=1.2, label="the landscape")
        above.plot(line, mean, color=BLUE, label="mean")
        doubt = {"color": BLUE, "alpha": 0.2, "lw": 0, "label": "± 2 standard deviations"}
        above.fill_between(line, mean - 2 * std, mean + 2 * std, **doubt)
        above.plot(*measured, "o", color=BLACK, label="measured")
        below.fill_between(line, gain, color=GREEN, alpha=0.5, lw=0)
        next_place = float(line[gain.argmax()])
        below.axvline(next_place, color=VERMILLION, lw=2, label="next point")
        finish(above, "both", title=name)
        figure = finish(below, "both", xlabel="position of the learning rate")
    charts[0].set_ylabel("loss")
    charts[columns].set_ylabel("Expected\nImprovement")
    legend(charts[columns - 1], "right")
    legend(charts[-1], "right")
    return figure


@styled
def best_so_far(curves: Mapping[str, Sequence[Sequence[float]]], start: int, predicted: Predicted) -> Figure:
    """Plot the best loss after each training: the median over the repeats, the quartiles, and predictions of
    the last mean."""
    (axes,) = panels(width=8)
    for (name, runs), style in zip(curves.items(), METHODS):
        best = torch.tensor(runs).double().cummin(1).values
        low, middle, high = torch.quantile(best, torch.tensor([0.25, 0.5, 0.75]).double(), 0)
        count = range(1, best.shape[1] + 1)
        axes.plot(count, middle, **style.line(marked=True), ms=4, label=name)
        axes.fill_between(count, low, high, color=style.colour, alpha=0.15, lw=0)
    mark_predicted(axes, {name: len(runs[0]) for name, runs in curves.items()}, predicted)
    axes.axvline(start + 0.5, color=MUTED, ls=":", lw=1.2)
    place = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
    axes.annotate("random up to here", (start + 0.3, 0.98), fontsize=SMALL, color=MUTED, **place)
    axes.legend()
    return finish(axes, "both", xlabel="trainings", ylabel="best loss so far")


@styled
def curves(pool: Sequence[Sequence[float]], rates: Sequence[float]) -> Figure:
    """Plot every real curve, coloured by its learning rate, and the final loss against the learning rate."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    colours = ScalarMappable(LogNorm(*trainings.LEARNING_RATE), "plasma")
    left, right = panels(2, width=11)
    order = sorted(
        zip(pool, rates), key=lambda each: math.inf if math.isnan(each[0][-1]) else each[0][-1], reverse=True
    )
    for losses, rate in order:  # the best curves lie on top
        left.plot(range(1, len(losses) + 1), losses, color=colours.to_rgba(rate), lw=0.8, alpha=0.7)
    left.set(xscale="log", yscale="log")
    log_ticks(left, "x", [1, 3, 9, 27], base=10)
    finite = [(rate, losses[-1]) for losses, rate in zip(pool, rates) if not math.isnan(losses[-1])]
    right.scatter(*zip(*finite), c=[rate for rate, _ in finite], norm=colours.norm, cmap="plasma", s=16)
    right.set(xscale="log", yscale="log")
    for axes in (left, right):
        _plain_numbers(axes, "y")
    diverged = f"{len(pool) - len(finite)} of {len(pool)} diverged and are not shown"
    finish(left, "both", xlabel="epochs", ylabel="validation loss")
    figure = finish(right, "both", xlabel="learning rate", ylabel="final validation loss", title=diverged)
    figure.colorbar(colours, ax=left, label="learning rate")
    return figure


@styled
def population(
    history: Sequence[Sequence[float]], families: Sequence[Sequence[int]], losses: Sequence[float], every: int
) -> Figure:
    """Plot the learning rate of every member over the epochs, and in colour the ancestry of the best one."""
    (axes,) = panels(width=8)
    epochs = [every * generation for generation in range(len(history) + 1)]
    for member in range(len(losses)):
        rates = [rates[member] for rates in history] + [history[-1][member]]
        axes.step(epochs, rates, where="post", color=MUTED, alpha=0.5, lw=1)
    member = min(range(len(losses)), key=lambda i: losses[i] if not math.isnan(losses[i]) else math.inf)
    line = [history[-1][member]]
    for rates, parents in zip(reversed(history[:-1]), reversed(families)):
        member = parents[member]
        line.insert(0, rates[member])
    label = "learning rates that trained the best member's weights"
    axes.step(epochs, [*line, line[-1]], where="post", color=VERMILLION, lw=3, label=label)
    legend(axes, "above")
    return finish(axes, "both", yscale="log", xlabel="epochs", ylabel="learning rate")


@styled
def optuna_timeline(study: Any) -> Figure:
    """Draw Optuna's timeline: the start, the end and the final state of each trial."""
    import warnings

    from matplotlib import pyplot
    from optuna.visualization.matplotlib import plot_timeline

    with warnings.catch_warnings(), pyplot.rc_context():  # Optuna changes the style
        warnings.simplefilter("ignore")  # Optuna warns that these plots are experimental
        axes = plot_timeline(study)
    axes.set_facecolor("none")
    start = date2num(min(trial.datetime_start for trial in study.trials))
    most = 86400 * (axes.get_xlim()[1] - start)
    seconds = [tick for tick in MaxNLocator(6).tick_values(0, most) if 0 <= tick <= most]
    axes.set_xticks(
        [start + tick / 86400 for tick in seconds], [f"{tick:g}" for tick in seconds], rotation=0, ha="center"
    )
    axes.figure.set_size_inches(9, 3.8)
    pyplot.close(axes.figure)
    return finish(axes, "x", xlabel="seconds since the first trial began", ylabel="trial")


def _plain_numbers(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
