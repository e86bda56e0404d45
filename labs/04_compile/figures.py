"""The figures of this lab. They compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from dlo_lib.labkit.figures import (
    BLUE,
    GREEN,
    MIB,
    MUTED,
    PALE,
    SMALL,
    VERMILLION,
    finish,
    legend,
    ms,
    panels,
    styled,
    text_on,
)


@styled
def chain(eager: float, compiled: float, one_by_one: int, at_once: int, compiled_with: str) -> Figure:
    """Plot time and bytes of the six operations, eager and compiled."""
    left, right = panels(2, width=9.5, height=3)
    names, colours = ["one by one", f"compiled\n({compiled_with})"], [MUTED, BLUE]
    for axes, values, label in (
        (left, (1e3 * eager, 1e3 * compiled), "ms (median)"),
        (right, (one_by_one / MIB, at_once / MIB), "MiB moved if each is\nread and written once"),
    ):
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        figure = finish(axes, "x", xlabel=label, xlim=(0, 1.2 * max(values)))
        axes.invert_yaxis()
    figure.suptitle("The same six operations")
    return figure


@styled
def idea() -> Figure:
    """Draw the operations between memory and registers: one by one, and fused."""
    left, right = panels(2, width=11, height=3.2, width_ratios=[3, 2])
    operations = ["x + bias", "gelu", "sigmoid(y)", "product", "· 0.5", "+ y"]
    reads = [2, 1, 1, 2, 1, 2]
    for axes, title in ((left, "one by one: through memory each time"), (right, "fused: once in, once out")):
        axes.axis("off")
        axes.set(
            xlim=(-0.2, 6.2 if axes is left else 4.2), ylim=(-0.25, 2.2), xticks=[], yticks=[], title=title
        )
        width = 6 if axes is left else 4
        axes.add_patch(FancyBboxPatch((0, 1.6), width - 0.1, 0.4, boxstyle="round,pad=0.05", color=PALE))
        axes.text(width / 2, 1.8, "memory", ha="center", va="center")
    cell = {"ha": "center", "va": "center", "color": text_on(BLUE)}
    for place, (name, number) in enumerate(zip(operations, reads)):
        left.add_patch(FancyBboxPatch((place + 0.08, 0.1), 0.72, 0.5, boxstyle="round,pad=0.05", color=BLUE))
        left.text(place + 0.44, 0.35, name, fontsize=SMALL, **cell)
        for each in range(number):
            _arrow(left, place + 0.15 + 0.2 * each, 1.52, 0.7, MUTED)
        _arrow(left, place + 0.66, 0.7, 1.52, VERMILLION)
    right.add_patch(FancyBboxPatch((0.08, 0.1), 3.72, 0.5, boxstyle="round,pad=0.05", color=BLUE))
    right.text(1.95, 0.35, "one loop, six operations in registers", **cell)
    for at, name in ((0.5, "x"), (1.3, "bias"), (2.1, "y")):
        _arrow(right, at, 1.52, 0.7, MUTED)
        right.text(at + 0.08, 1.1, name)
    _arrow(right, 3.4, 0.7, 1.52, VERMILLION)
    right.text(3.48, 1.1, "result")
    kinds = [Patch(color=MUTED, label="read (downwards)"), Patch(color=VERMILLION, label="written (upwards)")]
    figure = left.get_figure()
    figure.legend(handles=kinds, loc="outside lower center", ncols=2)
    return figure


def _arrow(axes: Axes, x: float, begin: float, end: float, colour: str) -> None:
    axes.annotate("", (x, end), (x, begin), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.8})


@styled
def pieces(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw the graphs of each function, before and after, and the Python between them."""
    (axes,) = panels(width=9, height=0.55 * 2 * len(before) + 0.9)
    whens = (("given", before), ("yours", after))
    rows = [(f"{name}, {when}", counts[name]) for name in before for when, counts in whens]
    for row, (_, (graphs, breaks)) in enumerate(rows):
        place = 0.0
        for number in range(max(graphs, breaks + 1)):
            if number < graphs:
                axes.barh(row, 1, left=place, color=BLUE, height=0.6)
                place += 1.06
            if number < breaks:
                axes.barh(row, 0.35, left=place, color=PALE, edgecolor=MUTED, hatch="///", height=0.6)
                place += 0.41
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    kinds = [
        Patch(color=BLUE, label="graph"),
        Patch(facecolor=PALE, edgecolor=MUTED, hatch="///", label="Python"),
    ]
    legend(axes, "right", handles=kinds)
    return finish(axes, None, title="Each blue piece is compiled separately; the grey pieces run in Python")


@styled
def buckets(counts: Mapping[int, int], chosen: Mapping[float, Sequence[int]]) -> Figure:
    """Plot the number of sequences of each length, and the buckets for several prices of a compilation."""
    every = panels(rows=len(chosen), width=9, height=1.4 + 1.2 * len(chosen), sharex=True)
    for axes, (price, found) in zip(every, chosen.items()):
        axes.bar(list(counts), list(counts.values()), width=1.0, color=PALE)
        for bucket in found:
            axes.axvline(bucket + 0.5, color=VERMILLION, lw=1.5)
        axes.set_yscale("log")
        number = f"{len(found)} bucket{'' if len(found) == 1 else 's'}"
        figure = finish(axes, title=f"a compilation costs {price:g} s: {number}", ylabel="sequences")
    every[-1].set_xlabel("length; a line is the end of a bucket")
    return figure


@styled
def optimizers(seconds: Mapping[str, float]) -> Figure:
    """Plot the time of one step of AdamW."""
    (axes,) = panels(width=9, height=2.8)
    own = {name: GREEN if name.startswith("yours") else MUTED for name in seconds}
    colours = [BLUE if "compiled" in name else colour for name, colour in own.items()]
    bars = axes.barh(list(seconds), [1e3 * value for value in seconds.values()], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    most = 1.12e3 * max(seconds.values())
    title = "AdamW on the same parameters"
    return finish(axes, "x", xlabel="ms per step (median)", xlim=(0, most), title=title)


@styled
def depth(
    operations: Mapping[str, Mapping[int, int]], seconds: Mapping[str, float], blocks: int, compiled_with: str
) -> Figure:
    """Plot the operations in all graphs against the number of blocks, and the seconds of compiling."""
    left, right = panels(2, width=10.5, height=3.4)
    for (name, line), colour, form in zip(operations.items(), (MUTED, BLUE), ("o--", "s-")):
        left.plot(list(line), list(line.values()), form, color=colour, label=name)
        left.set_xticks(list(line))
    labels = {
        "xlabel": "blocks",
        "ylabel": "operations in the graphs",
        "title": "Equal blocks share one graph",
    }
    finish(left, "both", ylim=(0, None), **labels)
    left.legend()
    bars = right.barh(list(seconds), list(seconds.values()), color=[MUTED, BLUE])
    right.bar_label(bars, fmt="%.1f s", padding=3)
    right.invert_yaxis()
    most = 1.25 * max(seconds.values())
    label = f"s of compiling, forward ({compiled_with})"
    return finish(right, "x", xlabel=label, xlim=(0, most), title=f"{blocks} blocks")


@styled
def race(compile_seconds: float, eager: float, compiled: float, paid: int | None) -> Figure:
    """Plot the seconds since the start against steps, eager and compiled."""
    (axes,) = panels(width=8.5, height=3.6)
    last = 2 * paid if paid else 200
    steps = [0, last]
    slow = [each * eager for each in steps]
    fast = [compile_seconds + each * compiled for each in steps]
    axes.plot(steps, slow, "--", color=MUTED, label=f"eager, {ms(eager)} a step")
    axes.plot(steps, fast, color=BLUE, label=f"compiled, {ms(compiled)} a step")
    if paid:
        axes.axvline(paid, color=VERMILLION, ls=":", lw=1.5)
        axes.plot(paid, paid * eager, "o", color=VERMILLION)
        text = f"paid after {paid:,} steps"
        axes.annotate(text, (paid, paid * eager), (8, -18), textcoords="offset points")
    axes.legend()
    title = "Compiling is paid back step by step" if paid else "Compiling is never paid back here"
    limits = {"xlim": (0, last), "ylim": (0, None)}
    return finish(axes, xlabel="steps", ylabel="s since the start", title=title, **limits)


@styled
def starts(seconds: Sequence[float]) -> Figure:
    """Plot the seconds of compiling of a cold and of a warm start."""
    (axes,) = panels(width=8, height=2)
    bars = axes.barh(["cold: empty folder", "warm: the same folder"], list(seconds), color=[MUTED, BLUE])
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.invert_yaxis()
    return finish(axes, "x", xlabel="s of compiling in a new process", xlim=(0, 1.15 * max(seconds)))
