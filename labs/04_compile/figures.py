"""The figures of this lab: each function draws what it is given and computes nothing of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from dlo_lib.drawing import new_figure

BLUE, ORANGE, GREEN, GREY, LIGHT = "#4c78a8", "#e4572e", "#59a14f", "#666666", "#d9d9d9"
MIB = 2**20


def _plain(axes: Axes, grid: Literal["x", "y"] = "y") -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    return axes


def chain(eager: float, compiled: float, one_by_one: int, at_once: int, compiled_with: str) -> Figure:
    """Time and bytes of the six operations, eager and compiled."""
    figure = new_figure(9, 3)
    left, right = figure.subplots(1, 2)
    names, colours = ["one by one", f"compiled\n({compiled_with})"], [GREY, BLUE]
    for axes, values, label in (
        (left, (1e3 * eager, 1e3 * compiled), "ms (median)"),
        (right, (one_by_one / MIB, at_once / MIB), "MiB moved if each is read and written once"),
    ):
        bars = _plain(axes, "x").barh(names, values, color=colours)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.set(xlabel=label, xlim=(0, 1.18 * max(values)))
        axes.invert_yaxis()
    figure.suptitle("The same six operations")
    return figure


def idea() -> Figure:
    """Operations between memory and registers: one by one, and fused."""
    figure = new_figure(10, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    operations = ["x + bias", "gelu", "sigmoid(y)", "product", "· 0.5", "+ y"]
    reads = [2, 1, 1, 2, 1, 2]
    for axes, title in ((left, "one by one: through memory each time"), (right, "fused: once in, once out")):
        axes.axis("off")
        axes.set(xlim=(-0.2, 6.2 if axes is left else 4.2), ylim=(-0.25, 2.2))
        axes.set_title(title, fontsize=11)
        width = 6 if axes is left else 4
        axes.add_patch(FancyBboxPatch((0, 1.6), width - 0.1, 0.4, boxstyle="round,pad=0.05", color=LIGHT))
        axes.text(width / 2, 1.8, "memory", ha="center", va="center")
    for place, (name, number) in enumerate(zip(operations, reads)):
        left.add_patch(FancyBboxPatch((place + 0.08, 0.1), 0.72, 0.5, boxstyle="round,pad=0.05", color=BLUE))
        left.text(place + 0.44, 0.35, name, ha="center", va="center", color="white", fontsize=9)
        for each in range(number):
            _arrow(left, place + 0.15 + 0.2 * each, 1.52, 0.7, GREY)
        _arrow(left, place + 0.66, 0.7, 1.52, ORANGE)
    right.add_patch(FancyBboxPatch((0.08, 0.1), 3.72, 0.5, boxstyle="round,pad=0.05", color=BLUE))
    right.text(1.95, 0.35, "one loop, six operations in registers", ha="center", va="center", color="white", fontsize=9)
    for at, name in ((0.5, "x"), (1.3, "bias"), (2.1, "y")):
        _arrow(right, at, 1.52, 0.7, GREY)
        right.text(at + 0.08, 1.1, name, fontsize=9)
    _arrow(right, 3.4, 0.7, 1.52, ORANGE)
    right.text(3.48, 1.1, "result", fontsize=9)
    figure.legend(handles=[Patch(color=GREY, label="read"), Patch(color=ORANGE, label="written")], loc="outside lower center", ncols=2, frameon=False)  # fmt: skip
    return figure


def _arrow(axes: Axes, x: float, begin: float, end: float, colour: str) -> None:
    axes.annotate("", (x, end), (x, begin), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6})


def pieces(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Figure:
    """Graphs and what lies between them: (graphs, times that Python takes over) of each function, as it was given and as it is now."""
    figure = new_figure(9, 0.55 * 2 * len(before) + 0.9)
    axes = figure.subplots()
    rows = [(f"{name}, {when}", counts[name]) for name in before for when, counts in (("given", before), ("yours", after))]
    for row, (_, (graphs, breaks)) in enumerate(rows):
        place = 0.0
        for number in range(max(graphs, breaks + 1)):
            if number < graphs:
                axes.barh(row, 1, left=place, color=BLUE, height=0.6)
                place += 1.06
            if number < breaks:
                axes.barh(row, 0.35, left=place, color=LIGHT, height=0.6)
                place += 0.41
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title("Each blue piece is compiled by itself; at grey, Python takes over")
    axes.legend(handles=[Patch(color=BLUE, label="graph"), Patch(color=LIGHT, label="Python")], loc="lower right", frameon=False)
    return figure


def buckets(counts: Mapping[int, int], chosen: Mapping[float, Sequence[int]]) -> Figure:
    """How many sequences there are of each length, and the buckets for several prices of a compilation."""
    figure = new_figure(9, 1.4 + 1.1 * len(chosen))
    every = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (price, found) in zip(every, chosen.items()):
        _plain(axes).bar(list(counts), list(counts.values()), width=1.0, color=LIGHT)
        for bucket in found:
            axes.axvline(bucket + 0.5, color=ORANGE, lw=1.3)
        axes.set_yscale("log")
        axes.set_title(f"a compilation costs {price:g} s: {len(found)} bucket{'' if len(found) == 1 else 's'}", fontsize=10, loc="left")
        axes.set_ylabel("sequences")
    every[-1].set_xlabel("length; a line is the end of a bucket")
    return figure


def optimizers(seconds: Mapping[str, float]) -> Figure:
    """Time of one step of AdamW."""
    figure = new_figure(9, 2.8)
    axes = _plain(figure.subplots(), "x")
    colours = [BLUE if "compiled" in name else GREEN if name.startswith("yours") else GREY for name in seconds]
    bars = axes.barh(list(seconds), [1e3 * value for value in seconds.values()], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="ms for a step (median)", xlim=(0, 1.12e3 * max(seconds.values())), title="AdamW on the same parameters")
    return figure


def depth(operations: Mapping[str, Mapping[int, int]], seconds: Mapping[str, float], blocks: int, compiled_with: str) -> Figure:
    """Operations in all graphs against the number of blocks; seconds of compiling for one depth."""
    figure = new_figure(10, 3.2)
    left, right = figure.subplots(1, 2)
    for (name, line), (colour, marker) in zip(operations.items(), ((GREY, "o"), (BLUE, "s"))):
        _plain(left).plot(list(line), list(line.values()), marker=marker, color=colour, label=name)
        left.set_xticks(list(line))
    left.set(xlabel="blocks", ylabel="operations in the graphs", ylim=(0, None), title="Equal blocks share one graph")
    left.legend(frameon=False)
    bars = _plain(right, "x").barh(list(seconds), list(seconds.values()), color=[GREY, BLUE])
    right.bar_label(bars, fmt="%.1f s", padding=3)
    right.invert_yaxis()
    right.set(xlabel=f"s of compiling, forward ({compiled_with})", xlim=(0, 1.2 * max(seconds.values())), title=f"{blocks} blocks")
    return figure


def race(compile_seconds: float, eager: float, compiled: float, paid: int | None) -> Figure:
    """Seconds since the start against steps, eager and compiled."""
    figure = new_figure(8.5, 3.6)
    axes = _plain(figure.subplots())
    last = 2 * paid if paid else 200
    steps = [0, last]
    axes.plot(steps, [each * eager for each in steps], color=GREY, label=f"eager, {1e3 * eager:.1f} ms a step")
    axes.plot(steps, [compile_seconds + each * compiled for each in steps], color=BLUE, label=f"compiled, {1e3 * compiled:.1f} ms a step")
    if paid:
        axes.axvline(paid, color=ORANGE, ls="--", lw=1)
        axes.plot(paid, paid * eager, "o", color=ORANGE)
        axes.annotate(f"paid after {paid:,} steps", (paid, paid * eager), (8, -16), textcoords="offset points", color=ORANGE)
    axes.set(xlabel="steps", ylabel="s since the start", xlim=(0, last), ylim=(0, None))
    axes.set_title("Compiling is paid back step by step" if paid else "Compiling is never paid back here")
    axes.legend(frameon=False)
    return figure


def starts(seconds: Sequence[float]) -> Figure:
    """Seconds of compiling of a cold and of a warm start."""
    figure = new_figure(8, 2)
    axes = _plain(figure.subplots(), "x")
    bars = axes.barh(["cold: empty folder", "warm: the same folder"], list(seconds), color=[GREY, BLUE])
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="s of compiling in a new process", xlim=(0, 1.15 * max(seconds)))
    return figure
