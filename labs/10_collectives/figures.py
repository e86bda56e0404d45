"""The figures of this lab: traffic, the steps of the ring and the tree, timings, and the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlo_lib.labkit import figures, predictions
from dlo_lib.labkit.figures import (
    BLACK,
    LIMIT,
    METHODS,
    MUTED,
    SMALL,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)

STYLES = dict(zip(("ring", "tree", "gloo"), METHODS))
RING, TREE = STYLES["ring"].colour, STYLES["tree"].colour
SHADES = [colormaps["Blues"](share) for share in (0.0, 0.15, 0.35, 0.55)]  # of a chunk with 0 to 3 shares
COMPLETE = to_rgba(figures.GREEN, 0.4)

Timing = tuple[str, int, int, float]


class RingStep(NamedTuple):
    """A rank and a chunk give the ranks whose shares are in it; ``arrived``: (rank, chunk) of this step."""

    title: str
    holds: list[list[set[int]]]
    arrived: set[tuple[int, int]]


def _busiest(axes: Axes, busiest: Mapping[str, Mapping[int, float]]) -> Figure:
    for (name, by_world), colour, line in zip(busiest.items(), (LIMIT, RING), ("o--", "s-")):
        worlds = list(by_world)
        axes.plot(worlds, list(by_world.values()), line, color=colour)
        place = {"xytext": (-4, 7), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (worlds[-1], by_world[worlds[-1]]), color=colour, **place)
    axes.set_xticks(worlds)
    axes.set_ylim(0, 1.2 * max(max(by_world.values()) for by_world in busiest.values()))
    title = "bytes sent and received by the busiest rank"
    return finish(axes, title=title, xlabel="ranks", ylabel="bytes ÷ bytes of the tensor")


@styled
def busiest(busiest: Mapping[str, Mapping[int, float]]) -> Figure:
    """Plot the traffic of the busiest rank against the number of ranks."""
    return _busiest(*panels(width=6, height=3.4), busiest)


@styled
def bytes_sent(
    sent: Mapping[int, Sequence[float]],
    busiest: Mapping[str, Mapping[int, float]],
    predicted: predictions.Predicted,
) -> Figure:
    """Plot the bytes sent by each rank, with 2 (N-1)/N as lines, and the busiest rank of two algorithms."""
    left, right = panels(2, width=11, height=3.6)
    place, ticks, highest = 0.0, {}, 2.0
    for world, shares in sent.items():
        left.bar([place + rank for rank in range(world)], list(shares), 0.8, color=RING)
        formula = 2 * (world - 1) / world
        left.plot([place - 0.5, place + world - 0.5], [formula] * 2, color=BLACK, linewidth=2)
        left.text(place + (world - 1) / 2, formula + 0.03, f"{formula:.2f}", ha="center", va="bottom")
        ticks[f"{world} ranks"] = place + (world - 1) / 2
        place += world + 1
    left.axhline(2, color=MUTED, linestyle=":", linewidth=1.2)
    if guesses := predictions.numbers(predicted, ticks):
        predictions.mark_predicted(left, ticks, predicted)
        highest = max(2.0, *guesses.values())
        left.legend(loc="lower right", frameon=True, framealpha=1)
    left.set_xticks(list(ticks.values()), list(ticks))
    title = "sent by each rank of your ring (bars), 2 (N-1)/N (lines)"
    finish(left, title=title, ylabel="bytes ÷ bytes of the tensor", ylim=(0, 1.1 * highest))
    return _busiest(right, busiest)


@styled
def ring(ranks: int = 4) -> Figure:
    """Draw reduce-scatter and all-gather on a ring: the shares that each rank has of each chunk, step by
    step."""
    every = panels(ranks, 2, width=11, height=5.4)
    for place, (axes, step) in enumerate(zip(every, _ring_steps(ranks), strict=True)):
        _hands(axes, step.holds, step.arrived, fits=24 // ranks if ranks < 6 else 2)
        axes.set_title(step.title)
        if place % ranks:
            axes.set_yticklabels([])
        axes.set_xlabel("chunk")
    return axes.get_figure()


def _ring_steps(ranks: int) -> list[RingStep]:
    holds = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    steps = []
    for half, title in enumerate(("reduce-scatter", "all-gather")):
        steps.append(RingStep(f"{title}: start", holds, set()))
        for step in range(1, ranks):
            new = [[set(chunk) for chunk in own] for own in holds]
            arrived = set()
            for rank in range(ranks):
                chunk = (rank - step) % ranks if half == 0 else (rank - step + 1) % ranks
                to = (rank + 1) % ranks
                new[to][chunk] = holds[rank][chunk] | (holds[to][chunk] if half == 0 else set())
                arrived.add((to, chunk))
            holds = new
            steps.append(RingStep(f"step {step}", holds, arrived))
    return steps


@styled
def ring_messages(ranks: int = 4, step: int = 0) -> Figure:
    """Draw one step of the all-reduce on a ring: the messages between neighbours, and what each rank has
    then."""
    steps = _ring_steps(ranks)
    del steps[ranks]  # the start of the all-gather is the end of the reduce-scatter
    shown = steps[min(step, len(steps) - 1)]
    left, right = panels(2, width=10, height=4)
    angles = [math.pi / 2 - 2 * math.pi * rank / ranks for rank in range(ranks)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    sent = dict(shown.arrived)  # by rank: the chunk that it receives
    for rank, (x, y) in enumerate(places):
        left.plot(x, y, "o", markersize=30, color=SHADES[1], markeredgecolor=RING)
        left.text(x, y, str(rank), ha="center", va="center", weight="bold")
        before = places[rank - 1]
        look = {"arrowstyle": "-|>" if rank in sent else "-", "color": RING if rank in sent else figures.PALE}
        bend = {"connectionstyle": "arc3,rad=-0.25", "linewidth": 2, "shrinkA": 17, "shrinkB": 17}
        left.annotate("", (x, y), before, arrowprops=look | bend)
        if rank in sent:
            middle = angles[rank] + math.pi / ranks
            out = 1.25 if ranks > 2 else 0.75
            at = (out * math.cos(middle), out * math.sin(middle))
            left.text(*at, f"chunk {sent[rank]}", ha="center", va="center", fontsize=SMALL)
    left.set(xlim=(-1.7, 1.7), ylim=(-1.45, 1.45), aspect="equal", xticks=[], yticks=[])
    left.spines[:].set_visible(False)
    half = "reduce-scatter" if step < ranks else "all-gather"
    left.set_title(f"{half}, {shown.title}" if shown.arrived else "start: no message yet")
    _hands(right, shown.holds, shown.arrived, fits=40 // ranks)
    right.set_title("whose shares each rank has of each chunk")
    right.set_xlabel("chunk")
    return right.get_figure()


def _hands(
    axes: Axes,
    holds: list[list[set[int]]],
    arrived: set[tuple[int, int]],
    fits: int,
) -> None:
    """Fill the axes with a cell for each rank and chunk; more than ``fits`` characters are counted."""
    ranks = len(holds)
    everyone = set(range(ranks))
    for rank, chunks in enumerate(holds):
        for chunk, shares in enumerate(chunks):
            colour = COMPLETE if shares == everyone else SHADES[min(len(shares), 3)]
            look = {"facecolor": colour, "edgecolor": figures.BACKGROUND, "linewidth": 2}
            axes.add_patch(Rectangle((chunk - 0.5, rank - 0.5), 1, 1, **look))
            complete = "sum" if fits > 4 else "Σ"
            text = complete if shares == everyone else "+".join(map(str, sorted(shares)))
            if len(text) > fits:
                text = f"{len(shares)} of {ranks}" if fits >= len("5 of 6") else f"{len(shares)}/{ranks}"
            weight = "bold" if shares == everyone else "normal"
            axes.text(chunk, rank, text, ha="center", va="center", fontsize=SMALL, weight=weight)
    for rank, chunk in arrived:
        frame = Rectangle((chunk - 0.44, rank - 0.44), 0.88, 0.88, fill=False, edgecolor=BLACK, linewidth=1.6)
        axes.add_patch(frame)
    axes.set_xlim(-0.55, ranks - 0.45)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@styled
def tree(ranks: int = 6) -> Figure:
    """Draw a broadcast from rank 0 by doubling: messages, and the ranks with the tensor after each round."""
    (axes,) = panels(width=6.4, height=3.4)
    have, rounds = 1, 0
    while have < ranks:
        for rank in range(min(have, ranks - have)):
            arrow = {"arrowstyle": "-|>", "color": TREE, "linewidth": 1.8, "shrinkA": 6, "shrinkB": 6}
            axes.annotate("", (rounds + 1, rank + have), (rounds, rank), arrowprops=arrow)
        have, rounds = min(2 * have, ranks), rounds + 1
    for when in range(rounds + 1):
        for rank in range(ranks):
            full = rank < 2**when
            fill = TREE if full else figures.BACKGROUND
            axes.plot(when, rank, "o", markersize=12, color=fill, markeredgecolor=TREE, markeredgewidth=1.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xticks(range(rounds + 1), ["start", *(f"round {when}" for when in range(1, rounds + 1))])
    axes.invert_yaxis()
    axes.margins(0.08)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes.get_figure()


def _timed(axes: Axes, timings: Sequence[Timing], world: int, names: Sequence[str], *, joined: bool) -> None:
    for name in names:
        own = [timing for timing in timings if (timing[0], timing[2]) == (name, world)]
        points = [(size, 1e6 * seconds) for _, size, _, seconds in own]
        look = STYLES[name].line(marked=True) if joined else STYLES[name].points()
        axes.plot(*zip(*points), **look, label=f"{name}, measured")
    sizes = sorted({size for _, size, _, _ in timings})
    log_ticks(axes, "x", sizes[::2], figures.size)
    axes.tick_params(axis="x", rotation=30)
    axes.set_yscale("log")


@styled
def timed(
    timings: Sequence[Timing], points: Mapping[str, tuple[int, int]], predicted: predictions.Predicted
) -> Figure:
    """Plot seconds against bytes, with a panel for each number of ranks, and the ring by your prediction.

    ``points``: the (bytes, ranks) of each prediction, which is the time of the ring divided by that of the
    tree.
    """
    tree = {(size, ranks): seconds for name, size, ranks, seconds in timings if name == "tree"}
    ratios = predictions.numbers(predicted, points)
    worlds = sorted({ranks for _, _, ranks, _ in timings})
    for axes, world in zip(panels(len(worlds), width=11, height=3.8, sharey=True), worlds):
        _timed(axes, timings, world, list(STYLES), joined=True)
        places = {name: size for name, (size, ranks) in points.items() if ranks == world}
        guesses = {
            name: 1e6 * ratios[name] * tree[size, world] for name, size in places.items() if name in ratios
        }
        predictions.mark_predicted(axes, places, guesses)
        figure = finish(axes, title=f"all-reduce on {world} ranks, measured", xlabel="tensor", ylabel="µs")
    axes.legend()
    return figure


def what_timed_shows(timings: Sequence[Timing], cores: int | None) -> str:
    """Return whether the measurement agrees with the text: the tree is faster for small tensors on four
    ranks, the ring for large ones."""
    seconds = {(name, size, ranks): time for name, size, ranks, time in timings}
    small, large = min(size for _, size, _ in seconds), max(size for _, size, _ in seconds)
    lines = []
    for winner, size, ranks in (("tree", small, 4), ("ring", large, 2), ("ring", large, 4)):
        loser = "ring" if winner == "tree" else "tree"
        ratio = seconds[loser, size, ranks] / seconds[winner, size, ranks]
        times = f"the {winner} takes {1 / ratio:.2f} times as long as the {loser}"
        where = f"{ranks} ranks, {figures.size(size)}: {times}"
        if ratio >= 1:
            lines.append(f"{where}, as the model says.")
            continue
        shared = cores is not None and cores < ranks
        why = (
            f"{ranks} ranks share {cores} cores"
            if shared
            else "another program may be at work: run the cell again"
        )
        lines.append(f"{where}. This disagrees with the model; {why}.")
    return "\n".join(lines)


@styled
def fitted(
    timings: Sequence[Timing],
    sizes: Sequence[int],
    lines: Mapping[tuple[str, int], Sequence[float]],
    crossing: float | None,
) -> Figure:
    """Plot the lines of the model and the measured points; the crossover of the largest number of ranks."""
    worlds = sorted({ranks for _, _, ranks, _ in timings})
    for axes, world in zip(panels(len(worlds), width=12, height=4, sharey=True), worlds):
        _timed(axes, timings, world, ("ring", "tree"), joined=False)
        for name in ("ring", "tree"):
            micros = [1e6 * seconds for seconds in lines[name, world]]
            axes.plot(sizes, micros, **STYLES[name].line(), label=f"{name}, your model")
        figure = finish(axes, title=f"{world} ranks", xlabel="tensor", ylabel="µs")
        if world == worlds[-1] and crossing is not None and crossing > 0:
            axes.axvline(crossing, color=BLACK, linestyle=":", linewidth=1.5)
            above = {"transform": axes.get_xaxis_transform(), "va": "top"}
            axes.text(crossing, 1, f" {figures.size(crossing)}", **above)
    legend(axes, "right")
    return figure


@styled
def at_scale(
    links: Mapping[str, Mapping[str, Sequence[float]]],
    sizes: Sequence[int],
    crossings: Mapping[str, float | None],
    tensors: Mapping[str, float],
) -> Figure:
    """Plot the model of ring and tree on several links, with the crossovers and some tensors of training."""
    every = panels(len(links), width=12, height=4.6, sharey=True)
    for axes, (link, curves) in zip(every, links.items()):
        for name, seconds in curves.items():
            axes.plot(sizes, list(seconds), **STYLES[name].line(), label=name)
        if crossing := crossings[link]:
            axes.axvline(crossing, color=BLACK, linestyle=":", linewidth=1.5)
            axes.text(crossing, 2e-6, f" equal at {figures.size(crossing)}", va="bottom")
        for name, size in tensors.items():
            axes.axvline(size, color=MUTED, linewidth=0.8, alpha=0.6)
            axes.text(size, 8e7, name, rotation=90, ha="right", va="top", fontsize=SMALL, color=MUTED)
        log_ticks(axes, "x", sizes[::4], figures.size)
        axes.tick_params(axis="x", rotation=30)
        axes.set(yscale="log", ylim=(1e-6, 1e8), yticks=[10.0**power for power in range(-6, 5, 2)])
        figure = finish(axes, title=link, xlabel="tensor", ylabel="seconds, predicted by your model")
    axes.legend(loc="center left", bbox_to_anchor=(0.02, 0.5))
    return figure
