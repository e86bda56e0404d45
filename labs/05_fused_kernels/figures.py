"""The figures of this lab. They measure nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLUE,
    GREEN,
    KIB,
    LIMIT,
    METHODS,
    MUTED,
    PALE,
    SKY,
    SMALL,
    VERMILLION,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted
from dlo_lib.profiling.roofline import Ceilings, MeasuredOperation


@styled
def roofline(ceilings: Ceilings, operations: Mapping[str, MeasuredOperation]) -> Figure:
    """Draw the limits of this machine, and each operation at its arithmetic intensity and its speed."""
    (axes,) = panels(width=8, height=3.8)
    places = [ceilings.ridge, *(operation.intensity for operation in operations.values())]
    line = [min(places) / 3, ceilings.ridge, max(places) * 3]
    axes.plot(
        line, [ceilings.attainable(each) / 1e9 for each in line], color=MUTED, label="limit of this machine"
    )
    for (name, operation), style in zip(operations.items(), METHODS):
        axes.plot(
            [operation.intensity], [operation.rate / 1e9], label=name, markersize=9, **{**style.points()}
        )
    axes.set(xscale="log", yscale="log")
    legend(axes, "right")
    return finish(axes, "both", xlabel="arithmetic intensity (operations per byte)", ylabel="speed (GFLOP/s)")


@styled
def programs(n: int, block: int) -> Figure:
    """Draw the elements of a tensor, divided into the blocks of programs; lanes after the end are excluded by
    the mask."""
    (axes,) = panels(width=10, height=1.7)
    total = -(-n // block) * block
    for place in range(total):
        number, inside = place // block, place < n
        fill = (BLUE, GREEN, VERMILLION, MUTED)[number % 4] if inside else PALE
        axes.add_patch(
            Rectangle(
                (place, 0),
                0.92,
                0.8,
                facecolor=fill,
                hatch="" if inside else "//",
                edgecolor=MUTED,
                linewidth=0.5,
            )
        )
        axes.text(
            place + 0.46, 0.4, str(place), ha="center", va="center", fontsize=SMALL, color=text_on(fill)
        )
    for number in range(total // block):
        axes.text(number * block + block / 2, 1.15, f"program {number}", ha="center", va="bottom")
    handles = [Patch(facecolor=PALE, hatch="//", edgecolor=MUTED, label=f"mask is False: offset ≥ n = {n}")]
    axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(1, -0.02))
    axes.set(xlim=(-0.1, total), ylim=(-0.1, 1.7), xticks=[], yticks=[])
    axes.axis("off")
    return finish(axes, None)


@styled
def online(row: Sequence[float], block: int) -> Figure:
    """Draw a row of numbers in blocks, with the maximum so far and the factor by which each block rescales
    the sum so far."""
    (axes,) = panels(width=9, height=3.2)
    places = range(len(row))
    axes.bar(places, row, width=0.7, color=[BLUE if (place // block) % 2 else SKY for place in places])
    largest = -math.inf
    for start in range(0, len(row), block):
        new = max(largest, *row[start : start + block])
        ends = start - 0.45, start + block - 0.55
        axes.plot(ends, [new, new], color=VERMILLION, label="maximum so far" if not start else None)
        factor = "1" if new == largest else f"exp({largest:g} - {new:g})" if start else "0"
        axes.text(sum(ends) / 2, new + 0.25, f"sum × {factor}", ha="center", va="bottom")
        largest = new
    legend(axes, "right")
    return finish(axes, xlabel="place in the row", ylabel="logit", ylim=(0, max(row) * 1.2))


@styled
def peaks(parts: Mapping[str, Sequence[float]], predicted: Predicted) -> Figure:
    """Plot the memory at the peak of both forms of the loss as a stack of its tensors, in GiB."""
    (axes,) = panels(width=7, height=3.2)
    for place, ((name, sizes), fill) in enumerate(zip(parts.items(), (MUTED, BLUE))):
        below = 0.0
        for size in sizes:
            axes.bar(
                [name], [size], bottom=[below], width=0.5, color=fill, edgecolor=BACKGROUND, linewidth=0.8
            )
            below += size
        axes.annotate(f"{below:.2f} GiB", (place, below), (0, 3), textcoords="offset points", ha="center")
    mark_predicted(axes, {name: place for place, name in enumerate(parts)}, predicted)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, "right")
    return finish(axes, ylabel="GiB at the peak", ylim=(0, 1.2 * max(sum(sizes) for sizes in parts.values())))


@styled
def written(yours: Mapping[int, int], eager: Mapping[int, int]) -> Figure:
    """Plot the bytes that both forms write, against the size of the vocabulary."""
    (axes,) = panels(width=8, height=3.2)
    for (name, values), style in zip((("separate operations", eager), ("yours", yours)), METHODS):
        axes.plot(
            list(values), [each / KIB for each in values.values()], label=name, **style.line(marked=True)
        )
    if yours:
        log_ticks(axes, "x", list(yours))
    axes.set_yscale("log")
    legend(axes, "right")
    return finish(axes, xlabel="words in the vocabulary", ylabel="KiB written")


@styled
def tiles(blocks: int, causal: bool) -> Figure:
    """Draw the tiles of the scores of one head: each row is a program, which passes over its tiles from left
    to right."""
    (axes,) = panels(width=6.4, height=4.2)
    kinds = {"computed": BLUE, "computed, a part masked": SKY, "not read": PALE}
    for row in range(blocks):
        for column in range(blocks):
            kind = (
                "computed"
                if not causal or column < row
                else "not read"
                if column > row
                else "computed, a part masked"
            )
            axes.add_patch(
                Rectangle((column, row), 0.94, 0.94, facecolor=kinds[kind], edgecolor=MUTED, linewidth=0.5)
            )
        axes.annotate(
            "",
            (blocks if not causal else row + 1, row + 0.47),
            (0, row + 0.47),
            arrowprops={"arrowstyle": "-|>", "color": LIMIT, "lw": 1.4},
        )
    shown = kinds if causal else {"computed": BLUE}
    axes.legend(
        handles=[Patch(color=fill, label=name) for name, fill in shown.items()],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )
    count = blocks * (blocks + 1) // 2 if causal else blocks**2
    ticks = [place + 0.47 for place in range(blocks)]
    axes.set_xticks(ticks, [str(place) for place in range(blocks)])
    axes.set_yticks(ticks, [str(place) for place in range(blocks)])
    axes.set(xlim=(0, blocks), ylim=(blocks, 0), aspect="equal")
    return finish(
        axes,
        None,
        xlabel="block of keys",
        ylabel="block of queries (program)",
        title=f"{count} tiles, one at a time in each program",
    )
