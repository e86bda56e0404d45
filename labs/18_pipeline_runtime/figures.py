"""The figures of this lab. Each function draws its arguments and computes only positions.

``dlo_lib.parallel.pipeline.draw`` draws the actions, planned or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLUE,
    LIMIT,
    METHODS,
    MUTED,
    PALE,
    SMALL,
    VERMILLION,
    finish,
    legend,
    panels,
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted, scaled
from dlo_lib.parallel.pipeline.draw import COLOURS, draw_actions
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import Action, B, F, Schedule

STYLES = dict(zip(("with flush", "2BW", "PipeDream"), METHODS))

Span = tuple[float, float]


@styled
def stage_costs(costs: Sequence[float], cuts: Mapping[str, Sequence[int]]) -> Figure:
    """Draw what each stage computes, piece by piece (embedding, blocks, head), for several cuts."""
    every = panels(len(cuts), width=4.8 * len(cuts) + 1.4, height=3.6, sharey=True)
    for axes, (name, starts) in zip(every, cuts.items()):
        totals = []
        for stage, (start, end) in enumerate(pairwise([*starts, len(costs)])):
            bottom = 0.0
            for piece in range(start, end):
                last = piece == len(costs) - 1
                colour = MUTED if piece == 0 else VERMILLION if last else BLUE
                label = "head" if last else {0: "embedding", 1: "block"}.get(piece)
                look = {"color": colour, "edgecolor": BACKGROUND, "hatch": "//" if last else None}
                axes.bar(stage, costs[piece], 0.7, bottom=bottom, label=label, **look)
                bottom += costs[piece]
            totals.append(bottom)
        for stage, total in enumerate(totals):
            box = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 0.5}
            axes.text(stage, 1.02 * total, f"{total:.2f}", ha="center", va="bottom", bbox=box)
        axes.axhline(max(totals), color=LIMIT, linestyle="--", linewidth=1.2)
        waiting = 1 - sum(totals) / (len(totals) * max(totals))
        axes.set_xticks(range(len(totals)), [f"stage {stage}" for stage in range(len(totals))])
        axes.margins(y=0.12)
        figure = finish(axes, None, title=f"{name}:\n{100 * waiting:.0f} % of the time the stages wait")
    every[0].set_ylabel("forward, GFLOPs for each token")
    legend(axes, "right")
    return figure


@styled
def one_rank() -> Figure:
    """Draw the inputs and outputs of a rank: activations from the left, gradients from the right."""
    (axes,) = panels(width=11, height=2.6)
    axes.set(xlim=(0, 12), ylim=(0.3, 3))
    axes.set_axis_off()
    for x, name in ((0.2, "rank r - 1"), (4.5, "rank r: its stage, its row"), (9.8, "rank r + 1")):
        wide = 3.0 if "its" in name else 2.0
        axes.add_patch(Rectangle((x, 0.4), wide, 2.2, facecolor=PALE, alpha=0.5, edgecolor=MUTED))
        axes.text(x + wide / 2, 2.75, name, ha="center")
    both = ((2.05, COLOURS[F], "forward, keep"), (0.95, COLOURS[B], "backward, free"))
    for at, (y, colour, text) in enumerate(both):
        axes.add_patch(Rectangle((4.8, y - 0.3), 2.4, 0.6, facecolor=colour, edgecolor="none"))
        axes.text(6.0, y, text, ha="center", va="center", color=text_on(colour))
        for left, right, label in (
            (2.2, 4.5, ("RECV_F", "SEND_B")[at]),
            (7.5, 9.8, ("SEND_F", "RECV_B")[at]),
        ):
            ends = ((left, y), (right, y)) if at == 0 else ((right, y), (left, y))
            arrow = {"arrowstyle": "-|>", "mutation_scale": 14, "color": colour, "linewidth": 2}
            axes.add_patch(FancyArrowPatch(*ends, **arrow))
            what = "activations" if at == 0 else "gradients"
            middle = (left + right) / 2
            axes.text(middle, y + 0.1, label, ha="center", va="bottom", family="monospace")
            axes.text(middle, y - 0.1, what, ha="center", va="top", fontsize=SMALL, color=MUTED)
    return axes.get_figure()


def _schedule(rows: Sequence[Sequence[str]], name: str) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row)) for row in rows)
    micro_batches = 1 + max((action.micro_batch for row in parsed for action in row), default=-1)
    return Schedule(name, tuple(range(len(rows))), micro_batches, parsed)


@styled
def planned(rows: Sequence[Sequence[str]], forward: float = 1.0, backward: float = 2.0) -> Figure:
    """Draw the table of ``rows`` in the time of the simulator."""
    simulation = simulate(_schedule(rows, "your table"), Costs(forward, backward / 2, backward / 2))
    bubble = f"bubble {_percent(simulation)}, {_held(simulation)}"
    return _stacked([(simulation, f"your table: makespan {simulation.makespan:g}, {bubble}")], "time")


@styled
def planned_and_measured(
    rows: Sequence[Sequence[str]],
    runs: Mapping[str, Sequence[Sequence[Span]] | None],
    unit: float,
    predicted: Predicted,
) -> Figure:
    """Draw several runs of the same table, one above the other, in milliseconds.

    A run has, for each rank, begin and end in seconds of each action of its row. None is the plan, where a
    forward takes ``unit`` seconds and a backward twice as long. ``predicted`` has milliseconds by the names
    of ``runs``: a diamond shows each on the last rank.
    """
    schedule, drawn = _schedule(rows, "your table"), []
    plan = simulate(schedule, Costs(1e3 * unit, 1e3 * unit, 1e3 * unit))
    for name, spans in runs.items():
        simulation = plan if spans is None else _measured(schedule, spans)
        drawn.append((simulation, f"{name}: {simulation.makespan:.0f} ms, bubble {_percent(simulation)}"))
    figure = _stacked(drawn, "milliseconds", end=max(simulation.makespan for simulation, _ in drawn))
    for axes, name in zip(figure.axes, runs):
        mark_predicted(
            axes, {name: len(rows) - 1}, {name: predicted.get(name)}, horizontal=True, clip_on=False
        )
        if len(axes.lines):
            axes.set_title(f"{axes.get_title('left')}; diamond: your prediction")
            axes.set_xlim(0, max(axes.get_xlim()[1], 1.02 * axes.lines[0].get_xdata()[0]))
    return figure


@styled
def schedules(tables: Sequence[Schedule]) -> Figure:
    """Draw several schedules with F = I = W, in one scale of time."""
    drawn = [
        (simulation, f"{simulation.schedule.name}: bubble {_percent(simulation)}, {_held(simulation)}")
        for simulation in map(simulate, tables)
    ]
    return _stacked(drawn, "time", end=max(simulation.makespan for simulation, _ in drawn))


@styled
def losses(
    curves: Mapping[float, Mapping[str, Sequence[tuple[float, float]]]], predicted: Predicted
) -> Figure:
    """Draw the loss over time for each scheme, a panel for each learning rate.

    ``predicted`` is by "learning rate 0.3": the last loss of PipeDream, divided by the last one with flush.
    """
    every = panels(len(curves), width=10, height=3.6, sharey=True)
    for axes, (lr, by_scheme) in zip(every, curves.items()):
        for name, line in by_scheme.items():
            axes.plot(*zip(*line), **STYLES[name].line(), label=name)
        name, end = f"learning rate {lr:g}", by_scheme["with flush"][-1][1]
        last = by_scheme["PipeDream"][-1][0]
        mark_predicted(axes, {name: last}, scaled({name: predicted.get(name)}, end))
        xlabel = "time (1: forward and backward\nof a batch on a rank)"
        figure = finish(axes, title=f"learning rate {lr:g}", xlabel=xlabel)
    every[0].set_ylabel("loss")
    every[0].legend()
    return figure


def seconds(spans: Sequence[Sequence[Span]]) -> float:
    """Return the time from the first action of all ranks to the end of the last."""
    return max(end for row in spans for _, end in row) - min(start for row in spans for start, _ in row)


def _measured(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Simulation:
    began = min(start for row in spans for start, _ in row)
    rows = (tuple((1e3 * (start - began), 1e3 * (end - began)) for start, end in row) for row in spans)
    return Simulation(schedule, tuple(rows))


def _stacked(drawn: Sequence[tuple[Simulation, str]], unit: str, end: float | None = None) -> Figure:
    ranks = drawn[0][0].schedule.ranks
    height = (0.42 * ranks + 0.65) * len(drawn) + 0.5
    every = panels(rows=len(drawn), width=11, height=height, sharex=True)
    for axes, (simulation, title) in zip(every, drawn):
        draw_actions(axes, simulation)
        axes.set_title(title)
    *others, _ = sorted((axes.get_legend() for axes in every), key=lambda legend: len(legend.get_texts()))
    for other in others:  # one legend is enough
        other.remove()
    if end is not None:
        axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    return axes.get_figure()


def _percent(simulation: Simulation) -> str:
    return f"{100 * simulation.bubble_ratio:.0f} % of the ideal time"


def _held(simulation: Simulation) -> str:
    return f"at most {max(simulation.in_flight())} in flight"
