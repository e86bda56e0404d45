"""The figures of this lab: each function draws its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from dlo_lib.labkit.figures import BLUE, METHODS, MUTED, VERMILLION, finish, legend, panels, styled


@styled
def bits_and_error(decibels: Mapping[str, Mapping[int, float]]) -> Figure:
    """The ratio of signal and error of each grid against the number of bits."""
    (ax,) = panels(width=6.5, height=3.2)
    for (name, values), method in zip(decibels.items(), METHODS):
        ax.plot(list(values), list(values.values()), **method.line(), label=name)
    legend(ax, "right")
    return finish(ax, "both", xlabel="bits", ylabel="signal / error, dB", xticks=range(2, 9))


@styled
def channels(activations: Tensor, weights: Tensor) -> Figure:
    """The largest absolute activation and the largest absolute weight of each input channel of a layer."""
    left, right = panels(2, width=9.5, height=3)
    for ax, values, colour in ((left, activations, BLUE), (right, weights, VERMILLION)):
        ax.bar(range(len(values)), values.tolist(), 1.0, color=colour)
        ax.set_yscale("log")
    finish(left, "y", xlabel="input channel", ylabel="largest |x|")
    return finish(right, "y", xlabel="input channel", ylabel="largest |w|")


@styled
def ablation(perplexities: Mapping[str, float], whole: float) -> Figure:
    """The perplexity of each treatment of the weights, and that of the model in floating point."""
    (ax,) = panels(width=7.5, height=2.8)
    ax.barh(list(perplexities), list(perplexities.values()), 0.6, color=BLUE)
    for row, value in enumerate(perplexities.values()):
        ax.text(value, row, f" {value:.2f}", va="center", ha="left")
    ax.axvline(whole, color=MUTED, linestyle="--", label=f"floating point, {whole:.2f}")
    ax.invert_yaxis()
    legend(ax, "above")
    least, most = min(whole, *perplexities.values()), max(perplexities.values())
    room = max(most - least, 0.05)
    return finish(ax, "x", xlabel="perplexity", xlim=(least - 0.2 * room, most + 0.2 * room))


@styled
def pareto(points: Mapping[str, tuple[float, float]], whole: float) -> Figure:
    """How far the perplexity of each method is above that in fp32, against its stored kB."""
    (ax,) = panels(width=9, height=4)
    lost = {name: (size, max(100 * (value / whole - 1), 0.01)) for name, (size, value) in points.items()}
    for (name, point), method in zip(lost.items(), METHODS):
        ax.plot(*point, **method.points(), markersize=8, label=name)
    front: list[tuple[float, float]] = []
    for size, value in sorted(lost.values()):
        if not front or value < front[-1][1]:
            front.append((size, value))
    ax.plot(*zip(*front), color=MUTED, linestyle="--", label="best for its size", zorder=0)
    ax.set_yscale("log")
    legend(ax, "right")
    return finish(ax, "both", xlabel="stored blocks, kB", ylabel="perplexity above fp32, %")


def rows_of(points: Mapping[str, tuple[float, float]]) -> Sequence[tuple[str, str, str]]:
    """Return the lines of a table with the points of ``pareto``."""
    lines = [("method", "kB", "perplexity")]
    return [*lines, *((name, f"{size:.1f}", f"{value:.3f}") for name, (size, value) in points.items())]
