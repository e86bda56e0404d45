"""The figures of this lab: each function draws what it is given and computes nothing of its own.

Tables are drawn by ``dlo_lib.parallel.pipeline.draw``, so that a cell looks the same everywhere; lines are told apart by markers too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlo_lib.drawing import new_figure
from dlo_lib.parallel.pipeline.draw import draw
from dlo_lib.parallel.pipeline.simulate import Simulation

BLUE, GREY = "#4c78a8", "#666666"
STYLES = [
    ("#4c78a8", "o"),
    ("#e4572e", "s"),
    ("#59a14f", "^"),
    ("#b07aa1", "D"),
    ("#9c755f", "v"),
    ("#666666", "P"),
    ("#f1a208", "X"),
    ("#2e86ab", "*"),
]


def _axes(width: float = 9, height: float = 3.8) -> Axes:
    axes = new_figure(width, height).subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return axes


def show(run: Simulation, name: str, *, memory: bool = False, for_weights: float = 0.0) -> Figure:
    """A table in time; with ``memory``, what each rank holds below it, in micro-batches of all its layers."""
    table, per_rank = run.schedule, run.schedule.stages // run.schedule.ranks
    most = max(run.peak_memory(1 / per_rank, for_weights / per_rank))
    sizes = f"ranks: {table.ranks}, micro-batches: {table.micro_batches}, held at most: {most:g}"
    title = f"{name}\n{sizes}; time {run.makespan:.4g}, bubble {100 * run.bubble_ratio:.0f} % of the ideal time"
    if not memory:
        return draw(run, title=title)
    return draw(run, activations=1 / per_rank, for_weights=for_weights / per_rank, title=title)


def bubble_law(ratios: Mapping[int, Mapping[int, float]]) -> Figure:
    """The bubble against the number of micro-batches, a line for each number of ranks; both axes logarithmic."""
    axes = _axes()
    for (ranks, line), (colour, marker) in zip(ratios.items(), STYLES):
        axes.plot(list(line), list(line.values()), color=colour, marker=marker, label=f"{ranks} ranks")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    several = sorted({count for line in ratios.values() for count in line})
    axes.set_xticks(several, [str(count) for count in several])
    axes.set_yticks([0.01, 0.1, 1, 7], ["1 %", "10 %", "100 %", "700 %"])
    axes.set(xlabel="micro-batches", ylabel="bubble / ideal time", title="Twice the micro-batches, half the bubble")
    axes.legend(frameon=False)
    return axes.get_figure()


def sending(ratios: Mapping[str, Mapping[float, float]]) -> Figure:
    """The bubble against the time of a message."""
    axes = _axes(9, 3.4)
    for (name, line), (colour, marker) in zip(ratios.items(), STYLES):
        axes.plot(list(line), [100 * ratio for ratio in line.values()], color=colour, marker=marker, label=name)
    axes.set(xlabel="time of a message (a forward of all layers of a rank takes 1)", ylabel="bubble (% of ideal)", ylim=(0, None))
    axes.set_title("4 ranks, 16 micro-batches: thin stages pay for every message")
    axes.legend(frameon=False)
    return axes.get_figure()


def held_by_rank(held: Mapping[str, Sequence[float]]) -> Figure:
    """What each rank holds, a line for each schedule."""
    axes = _axes()
    for (name, line), (colour, marker) in zip(held.items(), STYLES):
        axes.plot(range(len(line)), line, color=colour, marker=marker, label=name)
    ranks = len(next(iter(held.values())))
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set(ylabel="micro-batches held", ylim=(0, None), title=f"{ranks} ranks, 32 micro-batches: your formula")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return axes.get_figure()


def trade(runs: Mapping[str, Simulation], for_weights: float) -> Figure:
    """Bubble against memory, a point for each schedule."""
    axes = _axes(9, 4.2)
    for (name, run), (colour, marker) in zip(runs.items(), STYLES):
        per_rank = run.schedule.stages // run.schedule.ranks
        held = max(run.peak_memory(1 / per_rank, for_weights / per_rank))
        axes.plot(held, 100 * run.bubble_ratio, color=colour, marker=marker, markersize=9, linestyle="none", label=name)
    some = next(iter(runs.values())).schedule
    axes.set(xlabel="micro-batches held by the fullest rank", ylabel="bubble (% of ideal)", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{some.ranks} ranks, {some.micro_batches} micro-batches, F = I = W")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return axes.get_figure()


def board(entered: Mapping[float, float], known: Mapping[str, tuple[float, float]], targets: Mapping[float, float]) -> Figure:
    """The contest: bubble by cap, with known tables (memory, bubble) as single points and targets by cap as crosses."""
    axes = _axes(9, 4.2)
    axes.plot(list(entered), [100 * ratio for ratio in entered.values()], color="black", marker=".", label="your table under this cap")
    for (name, (held, ratio)), (colour, marker) in zip(known.items(), STYLES):
        axes.plot(held, 100 * ratio, color=colour, marker=marker, markersize=9, linestyle="none", label=name)
    axes.plot(
        list(targets), [100 * ratio for ratio in targets.values()], "x", color="black", markersize=11, markeredgewidth=2, label="target"
    )
    axes.set_yscale("log")
    ticks = (2, 5, 10, 20, 50, 100, 200)
    axes.set_yticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="memory cap (micro-batches)", ylabel="bubble / ideal time", title="4 ranks, 12 micro-batches, F = I = W")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return axes.get_figure()
