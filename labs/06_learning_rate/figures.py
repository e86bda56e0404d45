"""The figures of this lab. They compute only means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from dlo_lib.labkit.figures import BLACK, METHODS, MUTED, SMALL, finish, legend, log_ticks, panels, styled
from dlo_lib.labkit.predictions import Predicted, mark_predicted, numbers

BESIDE: dict[str, Any] = {"xytext": (-8, 0), "textcoords": "offset points", "fontsize": SMALL}


@styled
def by_rate(losses: Mapping[float, Sequence[float]], accuracy: Mapping[float, float]) -> Figure:
    """Plot the losses over the steps, a line per learning rate, and the final accuracy against the rate."""
    left, right = panels(2, width=10, height=4.2)
    for (rate, curve), style in zip(losses.items(), METHODS):
        left.plot(curve, **style.line(), label=f"{rate:g}")
    legend(left, "below", title="learning rate", ncols=5, columnspacing=1.2)
    labels = {"xlabel": "step", "ylabel": "training loss", "title": "one model, one batch order"}
    finish(left, "both", ylim=(0, 4), **labels)
    right.plot(list(accuracy), [100 * value for value in accuracy.values()], color=BLACK, marker="o")
    right.set_xscale("log")
    labels = {"xlabel": "learning rate", "ylabel": "test accuracy (%)", "title": "after the last step"}
    return finish(right, "both", ylim=(0, 102), **labels)


@styled
def tested(
    rates: Sequence[float],
    losses: Sequence[float],
    curve: Sequence[float],
    found: Mapping[str, float],
    reset: Mapping[float, float],
    predicted: Predicted,
) -> Figure:
    """Plot a range test (losses, smoothed curve, suggestions, predicted rates), and the test that restarts
    for each rate."""
    left, right = panels(2, width=11, height=4.2)
    left.plot(rates[: len(losses)], losses, color=MUTED, linewidth=0.8, alpha=0.6, label="loss")
    smoothed, *marks = (METHODS[index] for index in range(1 + len(found)))
    left.plot(rates[: len(curve)], curve, **smoothed.line(), label="smoothed")
    for (name, rate), style in zip(found.items(), marks):
        left.axvline(rate, **style.line(), linewidth=1.5, label=f"{name}: {rate:.2g}")
    heights = {"steepest": 0.5 * curve[0], "bottom": 0.2 * curve[0]}
    mark_predicted(left, heights, predicted, horizontal=True)
    for name, rate in numbers(predicted, heights).items():
        left.annotate(name, (rate, heights[name]), **BESIDE, ha="right", va="center")
    legend(left, "below", ncols=2)
    right.plot(list(reset), list(reset.values()), **METHODS[2].line(marked=True))
    for axes, title in (
        (left, "a growing rate, the mean of several orders"),
        (right, "a restart and a few steps for each rate"),
    ):
        axes.set_xscale("log")
        finish(axes, "both", xlabel="learning rate", ylabel="loss", ylim=(0, 2 * curve[0]), title=title)
    return left.get_figure()


@styled
def schedules(factors: Mapping[str, Sequence[float]], momenta: Sequence[float] = ()) -> Figure:
    """Plot the factors over the steps, and the momentum of OneCycle in a separate panel."""
    left, *right = panels(2 if momenta else 1, width=11 if momenta else 9, height=4.2)
    for number, ((name, line), style) in enumerate(zip(factors.items(), METHODS)):
        left.plot(
            line, **style.line(), linewidth=max(1.2, 4.2 - 0.6 * number), label=name
        )  # thinner on top: lines coincide
    legend(left, "below", ncols=2 if momenta else 4)
    for axes in right:
        axes.plot(momenta, color=BLACK)
        finish(axes, "both", xlabel="step", ylabel="momentum", title="OneCycle")
    return finish(left, "both", xlabel="step", ylabel="learning rate / peak", ylim=(-0.03, 1.08))


@styled
def spread(accuracies: Mapping[str, Sequence[float]], title: str, predicted: Predicted) -> Figure:
    """Plot every repeat as a point and the mean as a bar, a row per name, with the predictions in percent."""
    (axes,) = panels(width=9, height=0.9 + 0.45 * len(accuracies))
    for row, (values, style) in enumerate(zip(accuracies.values(), METHODS)):
        percent = [100 * value for value in values]
        axes.plot(percent, [row] * len(percent), **style.points(), alpha=0.6)
        axes.plot([sum(percent) / len(percent)] * 2, [row - 0.3, row + 0.3], color=style.colour, linewidth=3)
    mark_predicted(
        axes, {name: row + 0.25 for row, name in enumerate(accuracies)}, predicted, horizontal=True
    )
    if axes.get_legend_handles_labels()[1]:
        legend(axes, "right")
    axes.set_yticks(range(len(accuracies)), list(accuracies))
    axes.set_ylim(len(accuracies) - 0.4, -0.6)
    return finish(axes, "both", xlabel="test accuracy (%)", title=title)


@styled
def peaks(found: Mapping[str, float], scale: float, predicted: Mapping[str, float | None]) -> Figure:
    """Plot the peak of each batch size beside the two rules, with the noise scale and the predictions."""
    (axes,) = panels()
    sizes = [int(size) for size in found]
    base = 64
    range_style, *rule_styles = (METHODS[index] for index in range(3))
    for (name, power), style in zip((("linear rule", 1.0), ("sqrt rule", 0.5)), rule_styles):
        axes.plot(
            sizes, [found[str(base)] * (size / base) ** power for size in sizes], **style.line(), label=name
        )
    axes.plot(sizes, list(found.values()), **range_style.points(), markersize=9, label="range test")
    mark_predicted(axes, {size: int(size) for size in found}, predicted)
    if sizes[0] <= scale <= 4 * sizes[-1]:
        axes.axvline(scale, color=MUTED, linestyle=":", label=f"noise scale at the start: {scale:.0f}")
    log_ticks(axes, "x", sizes)
    low, high = axes.get_ylim()
    ticks = [digit * 10**power for power in range(-5, 3) for digit in (1, 2, 5)]
    log_ticks(axes, "y", [tick for tick in ticks if low <= tick <= high], text="{:g}".format)
    legend(axes, "right")
    return finish(axes, "both", xlabel="images in a batch", ylabel="peak of the learning rate")


@styled
def budgets(accuracies: Mapping[str, Mapping[int, Sequence[float]]], predicted: Predicted) -> Figure:
    """Plot accuracy against the length of the run: points are repeats, the line connects their means.

    ``predicted`` has percents for the shortest run.
    """
    (axes,) = panels()
    for (name, line), style in zip(accuracies.items(), METHODS):
        means = [100 * sum(values) / len(values) for values in line.values()]
        axes.plot(list(line), means, **style.line(), label=name)
        for epochs, values in line.items():
            axes.plot([epochs] * len(values), [100 * value for value in values], **style.points(), alpha=0.6)
    lengths = sorted({epochs for line in accuracies.values() for epochs in line})
    mark_predicted(axes, dict.fromkeys(accuracies, lengths[0]), predicted)
    for name, percent in numbers(predicted, accuracies).items():
        axes.annotate(name, (lengths[0], percent), **BESIDE | {"xytext": (8, 0)}, ha="left", va="center")
    log_ticks(axes, "x", lengths)
    axes.legend()
    labels = {"xlabel": "epochs in the whole run", "ylabel": "test accuracy (%)"}
    return finish(axes, "both", title="each point is a separate run of this length", **labels)
