"""The figures of this lab: each function draws its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlo_lib.labkit.figures import (
    BLACK,
    BLUE,
    LIMIT,
    METHODS,
    MUTED,
    VERMILLION,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)

Run = tuple[int, int, float]
"""Parameters, tokens and loss of a training."""


@styled
def stages(by_stage: Mapping[str, Mapping[str, int]]) -> Figure:
    """The part of each stage of CoAtNet-3 in the parameters and in the multiply-adds."""
    (ax,) = panels(width=9.5, height=2.6)
    for row, key in enumerate(("parameters", "multiply_adds")):
        whole, left = sum(stage[key] for stage in by_stage.values()), 0.0
        for (name, stage), method in zip(by_stage.items(), METHODS):
            part = 100 * stage[key] / whole
            ax.barh(row, part, 0.6, left=left, color=method.colour, label=name if row == 0 else None)
            if part > 4:
                ax.text(left + part / 2, row, f"{part:.0f}", color="white", ha="center", va="center")
            left += part
    ax.set_yticks([0, 1], ["parameters", "multiply-adds"])
    ax.invert_yaxis()
    legend(ax, "above", ncols=5)
    return finish(ax, "x", xlabel="% of the model, 512 pixels", xlim=(0, 100))


def _bottom(runs: Sequence[Run]) -> tuple[float, np.ndarray]:
    """The parameters at the bottom of a parabola through the runs in log N, and the parabola."""
    size, loss = np.log([run[0] for run in runs]), [run[2] for run in runs]
    bend = np.polyfit(size, loss, 2)
    return float(np.exp(-bend[1] / (2 * bend[0]))), bend


def lowest(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the parameters and the loss at the bottom of a valley, by a parabola in log N."""
    bottom, bend = _bottom(runs)
    return bottom, float(np.polyval(bend, np.log(bottom)))


def _valleys(ax: Axes, valleys: Mapping[float, Sequence[Run]]) -> None:
    for (budget, runs), method in zip(valleys.items(), METHODS):
        sizes = [run[0] for run in runs]
        ax.plot(sizes, [run[2] for run in runs], label=f"{budget:.1e} FLOPs", **method.points())
        bottom, bend = _bottom(runs)
        grid = np.geomspace(sizes[0], sizes[-1], 60)
        ax.plot(grid, np.polyval(bend, np.log(grid)), color=method.colour, linestyle="--", linewidth=1.2)
        ax.plot(bottom, np.polyval(bend, np.log(bottom)), marker="X", markersize=10, color=method.colour)


@styled
def valleys(found: Mapping[float, Sequence[Run]], entropy: float) -> Figure:
    """The loss of trainings that cost the same, by parameters: a valley for each budget, and its bottom."""
    (ax,) = panels(width=9, height=4)
    _valleys(ax, found)
    ax.axhline(entropy, color=LIMIT, linestyle=":", label="entropy")
    log_ticks(ax, "x", [1e3, 3e3, 1e4, 3e4], "{:,.0f}".format, base=10)
    legend(ax, "above")
    return finish(ax, "both", xlabel="parameters N in products (logarithmic)", ylabel="loss, nats a token")


@styled
def law(
    found: Mapping[float, Sequence[Run]],
    best: Callable[[float], float],
    line: tuple[float, float],
    large: tuple[float, float],
) -> Figure:
    """The lowest loss by FLOPs: the runs, your law, the straight line, and the large training."""
    (ax,) = panels(width=9, height=4)
    for (budget, runs), method in zip(found.items(), METHODS):
        ax.plot([budget] * len(runs), [run[2] for run in runs], **method.points())
    grid = np.geomspace(min(found) / 1.5, 3 * large[0], 60)
    ax.plot(grid, [best(each) for each in grid], color=BLUE, label="your law, best size")
    ax.plot(grid, (line[0] / grid) ** line[1], color=MUTED, linestyle="--", label="straight line")
    ax.plot(
        *large,
        marker="*",
        markersize=15,
        linestyle="",
        color=VERMILLION,
        label="trained after the prediction",
    )
    log_ticks(ax, "x", [1e9, 1e10, 1e11], "{:.0e}".format, base=10)
    log_ticks(ax, "y", [2.5, 3, 3.5, 4], base=10)
    legend(ax, "above")
    return finish(ax, "both", xlabel="FLOPs of a training (logarithmic)", ylabel="loss (logarithmic)")


@styled
def answer(
    runs: Sequence[Run], answered: Mapping[str, float], around: Mapping[int, float], entropy: float
) -> Figure:
    """Left the runs that were bought, right trainings of the target's cost by width, with your prediction."""
    left, right = panels(2, width=10.5, height=3.8)
    spots = left.scatter(
        [run[0] for run in runs], [run[1] for run in runs], c=[run[2] for run in runs], s=70, cmap="viridis"
    )
    bar = left.figure.colorbar(spots, ax=left)
    bar.set_label("loss, nats a token")
    left.plot(answered["width"], answered["tokens"], marker="*", markersize=15, color=VERMILLION)
    left.annotate(
        "your choice",
        (answered["width"], answered["tokens"]),
        (-8, -3),
        textcoords="offset points",
        ha="right",
    )
    log_ticks(left, "x", [4, 8, 16, 32, 64])
    log_ticks(left, "y", [1e4, 1e5, 1e6], "{:,.0f}".format, base=10)
    left.margins(0.1)
    right.plot(list(around), list(around.values()), label="trained", **METHODS[0].line(marked=True))
    size, loss = answered["width"], answered["loss"]
    reach = [[loss - answered["low"]], [answered["high"] - loss]]
    right.errorbar(size * 1.08, loss, reach, fmt="D", color=BLACK, capsize=5, label="your prediction")
    right.axhline(entropy, color=LIMIT, linestyle=":", label="entropy")
    log_ticks(right, "x", sorted(around))
    legend(right, "above")
    finish(left, "both", xlabel="width (logarithmic)", ylabel="tokens (logarithmic)")
    return finish(right, "both", xlabel="width (logarithmic)", ylabel="loss, nats a token")
