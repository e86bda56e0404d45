"""The figures of this lab: each function draws what it is given; the rings and trees of the idea are followed step by step, not computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlo_lib.drawing import new_figure

COLOURS = {"ring": "#0072B2", "tree": "#D55E00", "gloo": "#777777"}
STAR, GREY, COMPLETE = "#B00020", "#666666", "#009E73"
SHADES = ("#f4f4f4", "#d6e6f2", "#a9cce3", "#5fa2ce", "#9fd8c4")  # of a chunk with no, one, two, three shares; and complete

Timing = tuple[str, int, int, float]


def _clean(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _busiest(axes: Axes, busiest: Mapping[str, Mapping[int, float]]) -> None:
    for (name, by_world), colour, style in zip(busiest.items(), (STAR, COLOURS["ring"]), ("o-", "s-")):
        worlds = list(by_world)
        axes.plot(worlds, list(by_world.values()), style, color=colour)
        axes.annotate(name, (worlds[-1], by_world[worlds[-1]]), xytext=(-4, 7), textcoords="offset points", ha="right", color=colour)
    axes.set_xticks(worlds)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    _clean(axes, "sent and received by the busiest rank", "ranks", "in units of the tensor")


def busiest(busiest: Mapping[str, Mapping[int, float]]) -> Figure:
    """What passes through the busiest rank, against the number of ranks."""
    figure = new_figure(5.6, 3.2)
    _busiest(figure.subplots(), busiest)
    return figure


def bytes_sent(sent: Mapping[int, Sequence[float]], busiest: Mapping[str, Mapping[int, float]]) -> Figure:
    """What each rank has sent, with 2 (N-1)/N as lines; and the busiest rank of two algorithms."""
    figure = new_figure(11, 3.4)
    left, right = figure.subplots(1, 2)
    place, ticks = 0.0, []
    for world, shares in sent.items():
        left.bar([place + rank for rank in range(world)], list(shares), 0.8, color=COLOURS["ring"])
        formula = 2 * (world - 1) / world
        left.plot([place - 0.5, place + world - 0.5], [formula] * 2, color="black", linewidth=1.5)
        left.text(place + (world - 1) / 2, formula + 0.03, f"{formula:.2f}", ha="center", va="bottom")
        ticks.append(place + (world - 1) / 2)
        place += world + 1
    left.axhline(2, color=GREY, linestyle=":", linewidth=1)
    left.set_xticks(ticks, [f"{world} ranks" for world in sent])
    left.set_ylim(0, 2.2)
    _clean(left, "your ring: sent by each rank (bars), 2 (N-1)/N (lines)", "", "in units of the tensor")
    _busiest(right, busiest)
    return figure


def ring(ranks: int) -> Figure:
    """Reduce-scatter and all-gather on a ring: whose shares a rank has in its hands, for each chunk, step by step."""
    figure = new_figure(11, 5.2)
    rows = figure.subplots(2, ranks)
    holds = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # by rank and chunk: whose shares
    everyone = set(range(ranks))
    for half, (row, title) in enumerate(zip(rows, ("reduce-scatter", "all-gather"))):
        arrived: set[tuple[int, int]] = set()
        for step, axes in enumerate(row):
            if step:
                new = [[set(chunk) for chunk in own] for own in holds]
                arrived = set()
                for rank in range(ranks):
                    chunk = (rank - step) % ranks if half == 0 else (rank - step + 1) % ranks
                    to = (rank + 1) % ranks
                    new[to][chunk] = holds[rank][chunk] | (holds[to][chunk] if half == 0 else set())
                    arrived.add((to, chunk))
                holds = new
            _hands(axes, holds, arrived, everyone)
            axes.set_title(f"{title}: begin" if step == 0 else f"step {step}", fontsize=10, loc="left")
    rows[1, 0].set_xlabel("chunk")
    return figure


def _hands(axes: Axes, holds: list[list[set[int]]], arrived: set[tuple[int, int]], everyone: set[int]) -> None:
    ranks = len(holds)
    for rank, chunks in enumerate(holds):
        for chunk, shares in enumerate(chunks):
            colour = SHADES[-1] if shares == everyone else SHADES[min(len(shares), 3)]
            axes.add_patch(Rectangle((chunk - 0.5, rank - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
            text = "sum" if shares == everyone else "+".join(map(str, sorted(shares)))
            axes.text(chunk, rank, text, ha="center", va="center", fontsize=9, weight="bold" if shares == everyone else "normal")
    for rank, chunk in arrived:
        axes.add_patch(Rectangle((chunk - 0.44, rank - 0.44), 0.88, 0.88, fill=False, edgecolor="black", linewidth=1.6))
    axes.set_xlim(-0.55, ranks - 0.45)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def tree(ranks: int) -> Figure:
    """A broadcast from rank 0 by doubling: who has the tensor after each round, and who sends to whom."""
    figure = new_figure(6.4, 3.4)
    axes = figure.subplots()
    have, rounds = 1, 0
    while have < ranks:
        for rank in range(min(have, ranks - have)):
            arrow = {"arrowstyle": "-|>", "color": COLOURS["tree"], "linewidth": 1.5, "shrinkA": 6, "shrinkB": 6}
            axes.annotate("", (rounds + 1, rank + have), (rounds, rank), arrowprops=arrow)
        have, rounds = min(2 * have, ranks), rounds + 1
    for when in range(rounds + 1):
        for rank in range(ranks):
            full = rank < 2**when
            axes.plot(when, rank, "o", markersize=11, color=COLOURS["tree"] if full else "white", markeredgecolor=COLOURS["tree"])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xticks(range(rounds + 1), ["begin", *(f"round {when}" for when in range(1, rounds + 1))])
    axes.invert_yaxis()
    axes.margins(0.08)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _timed(axes: Axes, timings: Sequence[Timing], world: int, names: Sequence[str], line: str) -> None:
    for name in names:
        points = [(size, 1e6 * seconds) for algorithm, size, ranks, seconds in timings if (algorithm, ranks) == (name, world)]
        axes.plot(*zip(*points), "o" + line, color=COLOURS[name], markersize=5, label=f"{name}, measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for _, size, _, _ in timings})
    axes.set_xticks(sizes[::2], [_bytes(size) for size in sizes[::2]])
    axes.grid(axis="y", color="#eeeeee")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TB"


def timed(timings: Sequence[Timing]) -> Figure:
    """Seconds against bytes, a panel for each number of ranks."""
    figure = new_figure(11, 3.6)
    worlds = sorted({ranks for _, _, ranks, _ in timings})
    for axes, world in zip(figure.subplots(1, len(worlds), sharey=True), worlds):
        _timed(axes, timings, world, list(COLOURS), "-")
        _clean(axes, f"all-reduce on {world} ranks, measured", "tensor", "µs")
    axes.legend(frameon=False)
    return figure


def fitted(
    timings: Sequence[Timing], sizes: Sequence[int], lines: Mapping[tuple[str, int], Sequence[float]], crossing: float | None
) -> Figure:
    """The model's lines beside the measured points; the crossover of the largest number of ranks."""
    figure = new_figure(12, 3.8)
    worlds = sorted({ranks for _, _, ranks, _ in timings})
    for axes, world in zip(figure.subplots(1, len(worlds), sharey=True), worlds):
        _timed(axes, timings, world, ("ring", "tree"), "")
        for name in ("ring", "tree"):
            axes.plot(
                sizes, [1e6 * seconds for seconds in lines[name, world]], color=COLOURS[name], linewidth=1.5, label=f"{name}, your model"
            )
        _clean(axes, f"{world} ranks", "tensor", "µs")
        if world == worlds[-1] and crossing is not None and crossing > 0:
            axes.axvline(crossing, color="black", linestyle=":", linewidth=1.2)
            axes.text(crossing, 1, f" {_bytes(crossing)}", transform=axes.get_xaxis_transform(), va="top")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def at_scale(
    links: Mapping[str, Mapping[str, Sequence[float]]],
    sizes: Sequence[int],
    crossings: Mapping[str, float | None],
    tensors: Mapping[str, float],
) -> Figure:
    """Ring and tree by the model on several links, with the crossovers and some tensors of training."""
    figure = new_figure(11.5, 4.4)
    for axes, (link, curves) in zip(figure.subplots(1, len(links), sharey=True), links.items()):
        for name, seconds in curves.items():
            axes.plot(sizes, list(seconds), color=COLOURS[name], linewidth=2, label=name)
        if crossing := crossings[link]:
            axes.axvline(crossing, color="black", linestyle=":", linewidth=1.2)
            axes.text(crossing, 2e-6, f" same at {_bytes(crossing)}", va="bottom")
        for name, size in tensors.items():
            axes.axvline(size, color=GREY, linewidth=0.7, alpha=0.6)
            axes.text(size, 8e4, name, rotation=90, ha="right", va="top", fontsize=8, color=GREY)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(1e-6, 1e5)
        axes.set_xticks(sizes[::4], [_bytes(size) for size in sizes[::4]])
        axes.grid(axis="y", color="#eeeeee")
        _clean(axes, link, "tensor", "seconds, by your model")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.62))
    return figure
