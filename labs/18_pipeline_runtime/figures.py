"""The figures of this lab: each function draws what it is given and computes nothing but positions.

Actions are drawn as ``dlo_lib.parallel.pipeline.draw`` draws them everywhere, planned or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from dlo_lib.drawing import new_figure
from dlo_lib.parallel.pipeline.draw import COLOURS, draw_actions
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import Action, B, F, Schedule

BLOCK, HEAD, EMBEDDING, SLOWEST, GREY = "#4c78a8", "#e45756", "#bab0ac", "#B00020", "#666666"
STYLES = {"with flush": ("#000000", "-"), "2BW": ("#0072B2", "--"), "PipeDream": ("#D55E00", "-.")}

Span = tuple[float, float]


def stage_costs(costs: Sequence[float], cuts: Mapping[str, Sequence[int]]) -> Figure:
    """What each stage computes, piece by piece, for several cuts of the same row of pieces (embedding, blocks, head)."""
    figure = new_figure(4.8 * len(cuts) + 1.2, 3.4)
    panels = figure.subplots(1, len(cuts), sharey=True, squeeze=False)[0]
    for axes, (name, starts) in zip(panels, cuts.items()):
        totals = []
        for stage, (start, end) in enumerate(pairwise([*starts, len(costs)])):
            bottom = 0.0
            for piece in range(start, end):
                colour = EMBEDDING if piece == 0 else HEAD if piece == len(costs) - 1 else BLOCK
                label = "head" if colour == HEAD else "block" if piece == 1 else None
                axes.bar(stage, costs[piece], 0.7, bottom=bottom, color=colour, edgecolor="white", label=label)
                bottom += costs[piece]
            totals.append(bottom)
        for stage, total in enumerate(totals):
            axes.text(stage, total, f"{total:.2f}", ha="center", va="bottom", fontsize=9)
        axes.axhline(max(totals), color=SLOWEST, linestyle="--", linewidth=1)
        waiting = 1 - sum(totals) / (len(totals) * max(totals))
        axes.set_title(f"{name}: {100 * waiting:.0f} % of the time is waiting", fontsize=10, loc="left")
        axes.set_xticks(range(len(totals)), [f"stage {stage}" for stage in range(len(totals))])
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    panels[0].set_ylabel("forward, GFLOPs for each token")
    panels[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def one_rank() -> Figure:
    """What goes in and out of a rank: activations from the left, gradients from the right."""
    figure = new_figure(9.5, 2.3)
    axes = figure.subplots()
    axes.set(xlim=(0, 12), ylim=(0.3, 3))
    axes.set_axis_off()
    for x, name in ((0.2, "rank r - 1"), (4.5, "rank r: its stage, its row"), (9.8, "rank r + 1")):
        wide = 3.0 if "its" in name else 2.0
        axes.add_patch(Rectangle((x, 0.4), wide, 2.2, facecolor="#f2f2f2", edgecolor=GREY))
        axes.text(x + wide / 2, 2.75, name, ha="center", fontsize=10)
    for at, (y, colour, text) in enumerate(((2.05, COLOURS[F], "forward, keep"), (0.95, COLOURS[B], "backward, forget"))):
        axes.add_patch(Rectangle((4.8, y - 0.3), 2.4, 0.6, facecolor=colour, edgecolor="none"))
        axes.text(6.0, y, text, ha="center", va="center", color="white", fontsize=10)
        for left, right, label in ((2.2, 4.5, ("RECV_F", "SEND_B")[at]), (7.5, 9.8, ("SEND_F", "RECV_B")[at])):
            ends = ((left, y), (right, y)) if at == 0 else ((right, y), (left, y))
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color=colour, linewidth=1.8))
            what = "activations" if at == 0 else "gradients"
            axes.text((left + right) / 2, y + 0.1, label, ha="center", va="bottom", fontsize=9, family="monospace")
            axes.text((left + right) / 2, y - 0.1, what, ha="center", va="top", fontsize=8, color=GREY)
    return figure


def _schedule(rows: Sequence[Sequence[str]], name: str) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row)) for row in rows)
    micro_batches = 1 + max((action.micro_batch for row in parsed for action in row), default=-1)
    return Schedule(name, tuple(range(len(rows))), micro_batches, parsed)


def planned(rows: Sequence[Sequence[str]], forward: float = 1.0, backward: float = 2.0) -> Figure:
    """The table of ``rows`` in time, as the simulator sees it."""
    simulation = simulate(_schedule(rows, "your table"), Costs(forward, backward / 2, backward / 2))
    return _stacked(
        [(simulation, f"your table: makespan {simulation.makespan:g}, bubble {_percent(simulation)}, {_held(simulation)}")], "time"
    )


def planned_and_measured(rows: Sequence[Sequence[str]], runs: Mapping[str, Sequence[Sequence[Span]] | None], unit: float) -> Figure:
    """The same table several times, one above the other, in milliseconds.

    A run has, by rank, begin and end in seconds of each action of its row; None is the plan, where a forward takes ``unit``, a backward two.
    """
    schedule, drawn = _schedule(rows, "your table"), []
    for name, spans in runs.items():
        simulation = _measured(schedule, spans) if spans is not None else simulate(schedule, Costs(1e3 * unit, 1e3 * unit, 1e3 * unit))
        drawn.append((simulation, f"{name}: {simulation.makespan:.0f} ms, bubble {_percent(simulation)}"))
    return _stacked(drawn, "milliseconds", end=max(simulation.makespan for simulation, _ in drawn))


def schedules(tables: Sequence[Schedule]) -> Figure:
    """Several schedules with F = I = W, in one scale of time."""
    drawn = [
        (simulation, f"{simulation.schedule.name}: bubble {_percent(simulation)}, {_held(simulation)}")
        for simulation in map(simulate, tables)
    ]
    return _stacked(drawn, "time", end=max(simulation.makespan for simulation, _ in drawn))


def losses(curves: Mapping[float, Mapping[str, Sequence[tuple[float, float]]]]) -> Figure:
    """The loss over time by scheme, a panel for each learning rate."""
    figure = new_figure(10, 3.4)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (lr, by_scheme) in zip(panels, curves.items()):
        for name, line in by_scheme.items():
            colour, style = STYLES[name]
            axes.plot(*zip(*line), style, color=colour, label=name)
        axes.set_title(f"learning rate {lr:g}", loc="left", fontsize=10)
        axes.set_xlabel("time (forward and backward of a batch on a rank: 1)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_ylabel("loss")
    panels[0].legend(frameon=False)
    return figure


def _measured(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Simulation:
    began = min(start for row in spans for start, _ in row)
    return Simulation(schedule, tuple(tuple((1e3 * (start - began), 1e3 * (end - began)) for start, end in row) for row in spans))


def _stacked(drawn: Sequence[tuple[Simulation, str]], unit: str, end: float | None = None) -> Figure:
    ranks = drawn[0][0].schedule.ranks
    figure = new_figure(11, (0.42 * ranks + 0.6) * len(drawn) + 0.5)
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (simulation, title) in zip(panels, drawn):
        draw_actions(axes, simulation)
        axes.set_title(title, loc="left", fontsize=10)
    *others, _ = sorted((axes.get_legend() for axes in panels), key=lambda legend: len(legend.get_texts()))
    for legend in others:  # one says it for all
        legend.remove()
    if end is not None:
        panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel(unit)
    return figure


def _percent(simulation: Simulation) -> str:
    return f"{100 * simulation.bubble_ratio:.0f} % of the ideal time"


def _held(simulation: Simulation) -> str:
    return f"at most {max(simulation.in_flight())} in flight"
