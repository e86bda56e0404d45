"""The figures of this lab: each function draws what it is given and computes nothing but positions.

Parts have the colours of ``plot_memory``, messages those of a trace's timeline. Nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlo_lib.comm.timeline import COMPUTING
from dlo_lib.drawing import new_figure
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS

GIB, MIB = 2**30, 2**20
PARTS = {
    "weights": Part.WEIGHTS,
    "gradients": Part.GRADIENTS,
    "optimizer": Part.OPTIMIZER_STATE,
    "whole units": Part.UNITS,
}
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
STYLES = ("-", "--", "-.", ":")
ROOT, BLOCK, GREY = "#4c78a8", "#f58518", "#666666"


def _clean(axes: Axes, grid: str = "y", **labels: str) -> Figure:
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    return axes.get_figure()


def unit_sizes(choices: Mapping[str, tuple[int, int]]) -> Figure:
    """What is whole at once, in bytes, and how many gathers a step makes, by the size of a unit."""
    left, right = new_figure(9.5, 2.2).subplots(1, 2, sharey=True)
    for row, (whole, gathers) in enumerate(choices.values()):
        left.barh(row, whole / GIB, 0.6, color=COLOURS[Part.WEIGHTS])
        left.text(whole / GIB, row, f" {whole / GIB:.1f} GiB", va="center")
        right.barh(row, gathers, 0.6, color=GREY)
        right.text(gathers, row, f" {gathers}", va="center")
    left.set_yticks(range(len(choices)), choices)
    left.invert_yaxis()
    for axes, text in ((left, "whole at the same time (fp32)"), (right, "gathers in a step")):
        axes.margins(x=0.2)
        _clean(axes, "x", xlabel=text)
    return left.get_figure()


def planned(blocks: int) -> Figure:
    """When each unit is whole in a step, and what happens: gather, compute, reduce; time without unit."""
    figure = new_figure(10, 0.5 * blocks + 1.7)
    axes, now = figure.subplots(), 0.0

    def happens(row: int, text: str, length: float, colour: str) -> None:
        nonlocal now
        axes.barh(row, length, 0.5, left=now, color=colour, edgecolor="white", zorder=3)
        axes.text(now + length / 2, row, text, ha="center", va="center", fontsize=8, color="white", zorder=4)
        now += length

    def freed(row: int, start: float) -> None:
        nonlocal now
        axes.barh(row, now - start, 0.85, left=start, color=ROOT if row == 0 else BLOCK, alpha=0.25)
        now += 0.2

    gather, reduce = "#009e73", "#b3548a"
    happens(0, "gather", 0.8, gather)
    for row in range(1, blocks + 1):
        start = now
        happens(row, "gather", 0.8, gather)
        happens(row, "F", 1.0, COMPUTING)
        freed(row, start)
    axes.axvline(now - 0.1, color=GREY, ls=":", lw=1)
    axes.text(now - 0.1, blocks + 0.62, "forward | backward", ha="center", va="top", fontsize=9, color=GREY)
    for row in range(blocks, 0, -1):
        start = now
        happens(row, "gather", 0.8, gather)
        happens(row, "B", 2.0, COMPUTING)
        happens(row, "reduce", 0.8, reduce)
        freed(row, start)
    happens(0, "reduce", 0.8, reduce)
    freed(0, 0.0)
    _rows(axes, blocks)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("Planned: a unit is whole as long as its pale bar; at its end it is freed", loc="left", fontsize=10)
    return figure


def measured_whole(histories: Sequence[Sequence[tuple[int, bool]]]) -> Figure:
    """When each unit was whole, from (nanoseconds, whole) of each change; the first unit is the root."""
    spans = [[(a, b) for (a, on), (b, _) in pairwise(history) if on] for history in histories]
    begin = min(a for own in spans for a, _ in own)
    changes = sorted((moment, change) for own in spans for pair in own for moment, change in zip(pair, (1, -1)))
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    figure = new_figure(10, 0.4 * len(spans) + 1.0)
    axes = figure.subplots()
    for row, own in enumerate(spans):
        for a, b in own:
            axes.barh(row, (b - a) / 1e6, 0.7, left=(a - begin) / 1e6, color=ROOT if row == 0 else BLOCK, edgecolor="white")
    _rows(axes, len(spans) - 1)
    axes.set_xlabel("ms")
    axes.set_title(f"Measured on rank 0: units while they are whole, at most {most} at the same time", loc="left", fontsize=10)
    return figure


def _rows(axes: Axes, blocks: int) -> None:
    axes.set_yticks(range(blocks + 1), ["root", *(f"block {number}" for number in range(1, blocks + 1))])
    axes.set_ylim(blocks + 0.6, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def cuts(shapes: Mapping[str, tuple[int, int]], world: int) -> Figure:
    """Matrices coloured by the rank that holds each number: one flat buffer, and rows."""
    figure = new_figure(10, 3.6)
    sizes = [rows * columns for rows, columns in shapes.values()]
    piece = -(-sum(sizes) // world)
    owners = (torch.arange(sum(sizes)) // piece).split(sizes)
    flat = {name: owner.view(shape) for (name, shape), owner in zip(shapes.items(), owners)}
    by_row = {name: (torch.arange(rows) // -(-rows // world)).view(-1, 1).expand(rows, columns) for name, (rows, columns) in shapes.items()}
    panels = figure.subplots(1, 2, gridspec_kw={"wspace": 0.12})
    for axes, (title, held) in zip(panels, (("one flat buffer", flat), ("rows of each parameter", by_row))):
        left = 0
        for name, owner in held.items():
            for row in range(owner.shape[0]):
                for column in range(owner.shape[1]):
                    rank = int(owner[row, column])
                    axes.add_patch(_cell(left + column, row, RANKS[rank % len(RANKS)]))
                    axes.text(left + column + 0.5, row + 0.5, str(rank), ha="center", va="center", fontsize=7, color="white")
            axes.text(left + owner.shape[1] / 2, -0.5, f"{name} {tuple(owner.shape)}", ha="center", fontsize=9)
            left += owner.shape[1] + 2
        axes.set(xlim=(-0.2, left - 1.8), ylim=(max(rows for rows, _ in shapes.values()) + 0.2, -1.4))
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_axis_off()
    return figure


def _cell(x: float, y: float, colour: str) -> Rectangle:
    return Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.6)


def padding(worlds: Sequence[int], percent: Sequence[Sequence[float]]) -> Figure:
    """Padding in per cent of the parameters, (flat, rows) for each number of ranks."""
    axes = new_figure(8.5, 3.2).subplots()
    for name, values, colour, mark in zip(("one flat buffer", "rows of each parameter"), zip(*percent), RANKS[:2], "os"):
        axes.plot(worlds, values, mark + "-", color=colour, label=name, ms=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in range(1, 11)], [str(2**power) for power in range(1, 11)])
    axes.legend(frameon=False)
    return _clean(axes, xlabel="ranks", ylabel="padding, % of all parameters")


def resting(held: Mapping[int, Mapping[str, int]], formula: Mapping[int, float]) -> Figure:
    """What a rank holds after backward, by part, and 16 Psi / N."""
    axes = new_figure(8, 3.2).subplots()
    for row, (world, parts) in enumerate(held.items()):
        left = 0.0
        for name, size in parts.items():
            axes.barh(row, size / MIB, 0.6, left=left, color=COLOURS[PARTS[name]], edgecolor="white", label=name if row == 0 else None)
            left += size / MIB
        axes.plot(formula[world] / MIB, row, "D", color="black", mfc="white", ms=7, ls="none", label="16 Ψ/N" if row == 0 else None)
        axes.text(left + 0.02 * max(formula.values()) / MIB, row, f"{left:.1f} MiB", va="center")
    axes.set_yticks(range(len(held)), [f"{world} rank{'s' if world > 1 else ''}" for world in held])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(formula.values()) / MIB)
    axes.legend(frameon=False, loc="lower right")
    return _clean(axes, "x", xlabel="MiB of state on a rank, after backward")


def losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """The loss of each step, by run."""
    axes = new_figure(8, 3.2).subplots()
    for index, (name, values) in enumerate(curves.items()):
        axes.plot(range(1, len(values) + 1), values, color=RANKS[index], ls=STYLES[index], lw=6 - 1.4 * index, alpha=0.85, label=name)
    axes.legend(frameon=False)
    return _clean(axes, xlabel="step", ylabel="loss, mean over all targets")


def true_size(peaks: Mapping[int, Mapping[Part, int]], parameters: int) -> Figure:
    """What is alive at the peak of a step, by part, for growing numbers of ranks; the line is 16 Psi / N."""
    axes = new_figure(9, 3.8).subplots()
    parts = [part for part in Part if any(peak.get(part, 0) > 0.01 * GIB for peak in peaks.values())]
    for column, peak in enumerate(peaks.values()):
        bottom = 0.0
        for part in parts:
            size = peak.get(part, 0) / GIB
            axes.bar(column, size, 0.6, bottom=bottom, color=COLOURS[part], edgecolor="white", label=part.value if column == 0 else None)
            bottom += size
        axes.text(column, bottom, f"{bottom:.1f}", ha="center", va="bottom")
    axes.plot(range(len(peaks)), [16 * parameters / world / GIB for world in peaks], "D", color="black", mfc="white", label="16 Ψ/N")
    axes.set_xticks(range(len(peaks)), [f"{world} rank{'s' if world > 1 else ''}" for world in peaks])
    axes.margins(y=0.1)
    axes.legend(frameon=False, loc="upper right")
    return _clean(axes, ylabel="GiB on one rank, at the peak of a step")
