"""The figures of this lab: each function draws its arguments and computes only positions.

Parts have the colours of ``plot_memory``, messages those of the timeline of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.timeline import COMPUTING, KINDS
from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    BLUE,
    GIB,
    METHODS,
    MIB,
    MUTED,
    RANKS,
    SMALL,
    VERMILLION,
    finish,
    gib,
    legend,
    log_ticks,
    mib,
    panels,
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted, scaled
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS

PARTS = {
    "weights": Part.WEIGHTS,
    "gradients": Part.GRADIENTS,
    "optimizer": Part.OPTIMIZER_STATE,
    "whole units": Part.UNITS,
}
ROOT, BLOCK = BLUE, VERMILLION


@styled
def unit_sizes(choices: Mapping[str, tuple[int, int]]) -> Figure:
    """The bytes that are whole at once and the gathers of a step, by the size of a unit."""
    left, right = panels(2, width=10, height=2.4, sharey=True)
    for row, (whole, gathers) in enumerate(choices.values()):
        left.barh(row, whole / GIB, 0.6, color=COLOURS[Part.WEIGHTS])
        left.text(whole / GIB, row, f" {gib(whole)}", va="center")
        right.barh(row, gathers, 0.6, color=MUTED)
        right.text(gathers, row, f" {gathers}", va="center")
    left.set_yticks(range(len(choices)), choices)
    left.invert_yaxis()
    for axes, text in ((left, "whole at the same time (fp32)"), (right, "gathers in a step")):
        axes.margins(x=0.3)
        figure = finish(axes, "x", xlabel=text)
    return figure


@styled
def planned(blocks: int) -> Figure:
    """When each unit is whole in a step, and what happens: gather, compute, reduce; time without unit."""
    (axes,), now = panels(width=11, height=0.55 * blocks + 1.8), 0.0

    def happens(row: int, text: str, length: float, colour: str) -> None:
        nonlocal now
        axes.barh(row, length, 0.55, left=now, color=colour, edgecolor=BACKGROUND, zorder=3)
        place = {"ha": "center", "va": "center", "fontsize": SMALL, "zorder": 4}
        axes.text(now + length / 2, row, text, color=text_on(colour), **place)
        now += length

    def freed(row: int, start: float) -> None:
        nonlocal now
        axes.barh(row, now - start, 0.85, left=start, color=ROOT if row == 0 else BLOCK, alpha=0.25)
        now += 0.2

    gather, reduce = KINDS[Kind.ALL_GATHER], KINDS[Kind.REDUCE_SCATTER]
    happens(0, "gather", 1.25, gather)
    for row in range(1, blocks + 1):
        start = now
        happens(row, "gather", 1.25, gather)
        happens(row, "F", 1.0, COMPUTING)
        freed(row, start)
    axes.axvline(now - 0.1, color=MUTED, ls=":", lw=1.2)
    axes.text(now - 0.1, blocks + 0.62, "forward | backward", ha="center", va="top", color=MUTED)
    for row in range(blocks, 0, -1):
        start = now
        happens(row, "gather", 1.25, gather)
        happens(row, "B", 2.0, COMPUTING)
        happens(row, "reduce", 1.25, reduce)
        freed(row, start)
    happens(0, "reduce", 1.25, reduce)
    freed(0, 0.0)
    _rows(axes, blocks)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("Planned: a pale bar shows when a unit is whole; at its end the unit is freed")
    return axes.get_figure()


@styled
def moment(blocks: int, at: int) -> Figure:
    """One moment of a planned step: which units are whole, and what happens."""
    steps = [(0, "gather")]
    steps += [(unit, what) for unit in range(1, blocks + 1) for what in ("gather", "forward", "free")]
    steps += [
        (unit, what) for unit in range(blocks, 0, -1) for what in ("gather", "backward", "reduce", "free")
    ]
    steps += [(0, "reduce"), (0, "free")]
    at = min(at, len(steps) - 1)
    whole: set[int] = set()
    for unit, what in steps[: at + 1]:
        whole = whole - {unit} if what == "free" else whole | {unit}
    unit, what = steps[at]
    (axes,) = panels(width=10, height=0.5 * blocks + 1.4)
    for row in range(blocks + 1):
        axes.barh(row, 0.25, 0.7, color=ROOT if row == 0 else BLOCK)
        if row in whole:
            axes.barh(row, 0.75, 0.7, left=0.25, color=ROOT if row == 0 else BLOCK, alpha=0.35)
        own = row == unit and what in ("backward", "reduce")
        # the root's: those of the output projection come first
        gradients = own or (row == 0 and row in whole and at > 3 * blocks)
        text = (
            "whole, with its whole gradients"
            if gradients
            else "whole"
            if row in whole
            else "only this rank's rows"
        )
        axes.text(1.03, row, text, va="center", color=BLACK if row in whole else MUTED)
    axes.text(0.27, unit, what, va="center", color=BLACK, fontweight="bold")
    _rows(axes, blocks)
    axes.set_xlim(0, 1.6)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(
        f"Moment {at} of {len(steps) - 1}: {len(whole)} unit{'' if len(whole) == 1 else 's'} whole"
    )
    return axes.get_figure()


@styled
def measured_whole(histories: Sequence[Sequence[tuple[int, bool]]]) -> Figure:
    """When each unit was whole, from (nanoseconds, whole) of each change; the first unit is the root."""
    spans = [[(a, b) for (a, on), (b, _) in pairwise(history) if on] for history in histories]
    begin = min(a for own in spans for a, _ in own)
    pairs = [pair for own in spans for pair in own]
    changes = sorted([(a, 1) for a, _ in pairs] + [(b, -1) for _, b in pairs])
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    (axes,) = panels(width=10, height=0.42 * len(spans) + 1.1)
    for row, own in enumerate(spans):
        for a, b in own:
            colour = ROOT if row == 0 else BLOCK
            axes.barh(row, (b - a) / 1e6, 0.7, left=(a - begin) / 1e6, color=colour, edgecolor=BACKGROUND)
    _rows(axes, len(spans) - 1)
    axes.set_xlabel("ms")
    axes.set_title(f"Measured on rank 0: when units are whole, at most {most} at the same time")
    return axes.get_figure()


def _rows(axes: Axes, blocks: int) -> None:
    axes.set_yticks(range(blocks + 1), ["root", *(f"block {number}" for number in range(1, blocks + 1))])
    axes.set_ylim(blocks + 0.6, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


@styled
def cuts(shapes: Mapping[str, tuple[int, int]], world: int) -> Figure:
    """Matrices coloured by the rank that holds each number: one flat buffer, and rows."""
    sizes = [rows * columns for rows, columns in shapes.values()]
    piece = -(-sum(sizes) // world)
    owners = (torch.arange(sum(sizes)) // piece).split(sizes)
    flat = {name: owner.view(shape) for (name, shape), owner in zip(shapes.items(), owners)}
    by_row = {}
    for name, (rows, columns) in shapes.items():
        owner = torch.arange(rows) // -(-rows // world)
        by_row[name] = owner.view(-1, 1).expand(rows, columns)
    both = {"one flat buffer": flat, "rows of each parameter": by_row}
    for axes, (title, held) in zip(panels(2, width=12, height=4, gridspec_kw={"wspace": 0.12}), both.items()):
        left = 0
        for name, owner in held.items():
            for row in range(owner.shape[0]):
                for column in range(owner.shape[1]):
                    rank = int(owner[row, column])
                    colour = RANKS[rank].colour
                    axes.add_patch(_cell(left + column, row, colour))
                    text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(colour)}
                    axes.text(left + column + 0.5, row + 0.5, str(rank), **text)
            label = f"{name} {tuple(owner.shape)}"
            axes.text(left + owner.shape[1] / 2, -0.5, label, ha="center", fontsize=SMALL)
            left += owner.shape[1] + 2
        axes.set(xlim=(-0.2, left - 1.8), ylim=(max(rows for rows, _ in shapes.values()) + 0.2, -1.4))
        axes.set_title(title)
        axes.set_axis_off()
    return axes.get_figure()


def _cell(x: float, y: float, colour: str) -> Rectangle:
    return Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=BACKGROUND, linewidth=0.6)


@styled
def padding(worlds: Sequence[int], percent: Sequence[Sequence[float]]) -> Figure:
    """Padding in per cent of the parameters, (flat, rows) for each number of ranks."""
    (axes,) = panels(width=8.5, height=3.4)
    for name, values, style in zip(("one flat buffer", "rows of each parameter"), zip(*percent), METHODS):
        axes.plot(worlds, values, **style.line(marked=True), label=name)
    log_ticks(axes, "x", [2**power for power in range(1, 11)])
    axes.legend()
    return finish(axes, xlabel="ranks", ylabel="padding, % of all parameters")


@styled
def resting(
    held: Mapping[int, Mapping[str, int]], formula: Mapping[int, float], predicted: Predicted
) -> Figure:
    """What a rank holds after backward, by part, and 16 Psi / N.

    ``predicted`` is by "2 ranks", in times the bytes of one rank.
    """
    (axes,) = panels(width=8.5, height=3.4)
    for row, (world, parts) in enumerate(held.items()):
        left = 0.0
        for name, size in parts.items():
            look = {
                "color": COLOURS[PARTS[name]],
                "edgecolor": BACKGROUND,
                "label": name if row == 0 else None,
            }
            axes.barh(row, size / MIB, 0.6, left=left, **look)
            left += size / MIB
        label = "16 Ψ/N" if row == 0 else None
        axes.plot(formula[world] / MIB, row, "o", color=BLACK, mfc=BACKGROUND, ms=7, ls="none", label=label)
        axes.text(left + 0.02 * max(formula.values()) / MIB, row, mib(left * MIB), va="center")
    names = [f"{world} rank{'s' if world > 1 else ''}" for world in held]
    one = sum(held[1].values()) / MIB
    rows = {name: row + 0.3 for row, name in enumerate(names)}  # below the circle of the formula
    mark_predicted(axes, rows, scaled(predicted, one), horizontal=True)
    axes.set_yticks(range(len(held)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.2 * max(formula.values()) / MIB, axes.get_xlim()[1]))
    axes.legend(loc="lower right")
    return finish(axes, "x", xlabel="MiB of state on a rank, after backward")


@styled
def losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """The loss of each step, by run."""
    (axes,) = panels(width=8, height=3.4)
    for index, ((name, values), style) in enumerate(zip(curves.items(), METHODS)):
        width = max(1.5, 6 - 1.4 * index)  # equal curves lie on each other
        axes.plot(range(1, len(values) + 1), values, **style.line(), lw=width, alpha=0.85, label=name)
    axes.legend()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(axes, xlabel="step", ylabel="loss, mean over all targets")


@styled
def true_size(peaks: Mapping[int, Mapping[Part, int]], parameters: int, predicted: Predicted) -> Figure:
    """The memory at the peak of a step, by part, for growing numbers of ranks; the circle is 16 Psi / N.

    ``predicted`` is by "8 ranks", in GiB.
    """
    (axes,) = panels()
    divided = (Part.WEIGHTS, Part.OPTIMIZER_STATE)
    others = [part for part in Part if part not in (*divided, Part.GRADIENTS)]
    others = [part for part in others if any(peak.get(part, 0) > 0.01 * GIB for peak in peaks.values())]
    for column, (world, peak) in enumerate(peaks.items()):
        own = min(peak[Part.GRADIENTS], 4 * parameters / world)
        stack = [(part.value, peak[part], COLOURS[part], None) for part in divided]
        stack.append(("gradients, own rows", own, COLOURS[Part.GRADIENTS], None))
        stack.append(("gradients, whole", peak[Part.GRADIENTS] - own, COLOURS[Part.GRADIENTS], "//"))
        stack += [(part.value, peak.get(part, 0), COLOURS[part], None) for part in others]
        bottom = 0.0
        for name, size, colour, hatch in stack:
            look = {
                "color": colour,
                "edgecolor": BACKGROUND,
                "hatch": hatch,
                "label": name if column == 0 else None,
            }
            axes.bar(column, size / GIB, 0.6, bottom=bottom, **look)
            bottom += size / GIB
        axes.text(column, bottom, f"{bottom:.1f}", ha="center", va="bottom")
    formula = [16 * parameters / world / GIB for world in peaks]
    axes.plot(range(len(peaks)), formula, "o", color=BLACK, mfc=BACKGROUND, ls="none", label="16 Ψ/N")
    names = [f"{world} rank{'s' if world > 1 else ''}" for world in peaks]
    mark_predicted(axes, {name: column + 0.15 for column, name in enumerate(names)}, predicted)
    axes.set_xticks(range(len(peaks)), names)
    axes.margins(y=0.1)
    legend(axes, "right", reverse=True)
    return finish(axes, ylabel="GiB on one rank, at the peak of a step")
