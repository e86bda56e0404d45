"""The figures of this lab: each function draws what it is given. Methods are told apart by markers or place, not by colour alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import trainings
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dlo_lib.drawing import new_figure

STYLES = [("#4c78a8", "o"), ("#e4572e", "s"), ("#59a14f", "^"), ("#b07aa1", "D")]
GREY = "#666666"


def _plain(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return axes


def landscape(searches: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """The landscape from above, once for each search, with its points, and a tick below for each learning rate that it has tried."""
    side = 120
    rates, decays = (
        [low * (high / low) ** ((i + 0.5) / side) for i in range(side)] for low, high in (trainings.LEARNING_RATE, trainings.WEIGHT_DECAY)
    )
    losses = [[trainings.landscape(rate, decay) for rate in rates] for decay in decays]
    figure = new_figure(10, 4.2)
    charts = figure.subplots(1, len(searches), sharey=True)
    for axes, (name, points) in zip(charts, searches.items()):
        mesh = axes.pcolormesh(rates, decays, losses, cmap="viridis", shading="nearest", rasterized=True)
        tried = [rates[min(side - 1, int(u * side))] for u, _ in points]
        axes.scatter(tried, [decays[min(side - 1, int(v * side))] for _, v in points], color="white", edgecolor="black", s=36, zorder=3)
        axes.plot(
            tried, [0.02] * len(tried), "|", color="black", ms=14, mew=1.6, transform=axes.get_xaxis_transform(), clip_on=False, zorder=4
        )
        axes.set(xscale="log", yscale="log", xlabel="learning rate")
        axes.set_title(f"{name}: {len(points)} trainings, {len({u for u, _ in points})} learning rates", fontsize=10, loc="left")
    charts[0].set_ylabel("weight decay")
    figure.colorbar(mesh, ax=charts, label="loss")
    return figure


def best_losses(found: Mapping[str, Sequence[float]], label: str, *, log: bool = False) -> Figure:
    """For each method the best loss of every repeat as a dot, and their median as a line."""
    figure = new_figure(8, 0.6 * len(found) + 1.2)
    axes = _plain(figure.subplots())
    spread = torch.Generator().manual_seed(0)
    for place, (losses, (colour, _)) in enumerate(zip(found.values(), STYLES)):
        heights = place + 0.3 * (torch.rand(len(losses), generator=spread) - 0.5)
        axes.scatter(losses, heights, s=10, alpha=0.4, color=colour)
        axes.plot([sorted(losses)[len(losses) // 2]] * 2, [place - 0.3, place + 0.3], color="black", lw=2)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel(f"{label} (one dot a repeat; the line is the median)")
    if log:
        axes.set_xscale("log")
        _plain_numbers(axes, "x")
    return figure


def improvement(
    line: Tensor, truth: Tensor, measured: tuple[Tensor, Tensor], pictures: Mapping[str, tuple[Tensor, Tensor, Tensor]]
) -> Figure:
    """Mean and doubt of the process above, Expected Improvement below, a column for each length scale."""
    figure = new_figure(11, 4.4)
    charts = figure.subplots(2, len(pictures), sharex=True, sharey="row", height_ratios=(2, 1))
    for (above, below), (name, (mean, std, gain)) in zip(charts.T, pictures.items()):
        above.plot(line, truth, color=GREY, ls="--", lw=1, label="the landscape")
        above.plot(line, mean, color=STYLES[0][0], label="mean")
        above.fill_between(line, mean - 2 * std, mean + 2 * std, color=STYLES[0][0], alpha=0.2, lw=0, label="± 2 standard deviations")
        above.plot(*measured, "o", color="black", ms=5, label="measured")
        above.set_title(name, fontsize=10, loc="left")
        below.fill_between(line, gain, color=STYLES[2][0], alpha=0.5, lw=0)
        below.axvline(float(line[gain.argmax()]), color=STYLES[1][0], lw=2)
        below.set_xlabel("place of the learning rate")
        for axes in (above, below):
            _plain(axes)
    charts[0][0].set_ylabel("loss")
    charts[1][0].set_ylabel("Expected\nImprovement")
    charts[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    charts[1][-1].annotate("red: measured next", (1.02, 0.5), xycoords="axes fraction", fontsize=8)
    return figure


def best_so_far(curves: Mapping[str, Sequence[Sequence[float]]], start: int) -> Figure:
    """The best loss after each training: the median over the repeats, and the half of them around it."""
    figure = new_figure(8, 3.8)
    axes = _plain(figure.subplots())
    for (name, runs), (colour, marker) in zip(curves.items(), STYLES):
        best = torch.tensor(runs).double().cummin(1).values
        low, middle, high = torch.quantile(best, torch.tensor([0.25, 0.5, 0.75]).double(), 0)
        count = range(1, best.shape[1] + 1)
        axes.plot(count, middle, color=colour, marker=marker, ms=4, label=name)
        axes.fill_between(count, low, high, color=colour, alpha=0.15, lw=0)
    axes.axvline(start + 0.5, color=GREY, ls=":", lw=1)
    axes.annotate(
        "random until here", (start + 0.3, 0.96), xycoords=("data", "axes fraction"), ha="right", va="top", fontsize=8, color=GREY
    )
    axes.set(xlabel="trainings", ylabel="best loss so far")
    axes.legend(frameon=False, fontsize=9)
    return figure


def curves(pool: Sequence[Sequence[float]], rates: Sequence[float]) -> Figure:
    """Every real curve, coloured by its learning rate; and the final loss against the learning rate."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    colours = ScalarMappable(LogNorm(*trainings.LEARNING_RATE), "plasma")
    figure = new_figure(11, 3.8)
    left, right = figure.subplots(1, 2)
    for losses, rate in zip(pool, rates):
        left.plot(range(1, len(losses) + 1), losses, color=colours.to_rgba(rate), lw=0.8, alpha=0.7)
    left.set(xscale="log", yscale="log", xlabel="epochs", ylabel="validation loss")
    left.set_xticks([1, 3, 9, 27], ["1", "3", "9", "27"])
    left.set_xticks([], minor=True)
    finite = [(rate, losses[-1]) for losses, rate in zip(pool, rates) if not math.isnan(losses[-1])]
    right.scatter(*zip(*finite), c=[rate for rate, _ in finite], norm=colours.norm, cmap="plasma", s=14)
    right.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="final validation loss")
    right.set_title(f"{len(pool) - len(finite)} of {len(pool)} diverged and are not shown", fontsize=9, loc="left")
    for axes in (left, right):
        _plain(axes)
        _plain_numbers(axes, "y")
    figure.colorbar(colours, ax=left, label="learning rate")
    return figure


def population(history: Sequence[Sequence[float]], families: Sequence[Sequence[int]], losses: Sequence[float], every: int) -> Figure:
    """The learning rate of every member over the epochs; in colour the ancestry of the member that ended best."""
    figure = new_figure(8, 3.8)
    axes = _plain(figure.subplots())
    epochs = [every * generation for generation in range(len(history) + 1)]
    for member in range(len(losses)):
        axes.step(epochs, [rates[member] for rates in history] + [history[-1][member]], where="post", color="#bbbbbb", lw=1)
    member = min(range(len(losses)), key=lambda i: losses[i] if not math.isnan(losses[i]) else math.inf)
    line = [history[-1][member]]
    for rates, parents in zip(reversed(history[:-1]), reversed(families)):
        member = parents[member]
        line.insert(0, rates[member])
    axes.step(epochs, [*line, line[-1]], where="post", color=STYLES[1][0], lw=2.5, label="what the best member's weights were trained with")
    axes.set(yscale="log", xlabel="epochs", ylabel="learning rate")
    axes.legend(frameon=False, fontsize=9)
    return figure


def optuna_timeline(study: Any) -> Figure:
    """Optuna's own picture of when each trial began and ended, and how."""
    import warnings

    from matplotlib import pyplot
    from optuna.visualization.matplotlib import plot_timeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna says that these plots are experimental
        figure = plot_timeline(study).figure
    figure.set_size_inches(9, 3.8)
    pyplot.close(figure)
    return figure


def _plain_numbers(axes: Axes, which: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
