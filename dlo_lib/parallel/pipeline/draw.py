"""Draws a schedule: the horizontal axis is time, each rank has a row, colours show the kind of action,
numbers show the micro-batch, and bubbles are white.

The same function draws a simulation (``simulate``) and a measured step (``Pipeline.measured``), so that the
two can be compared. A second plot shows the memory of each rank over time. ``as_text`` draws in a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_lib.base.drawing import new_figure, rank_line, rows_of_ranks
from dlo_lib.parallel.pipeline.simulate import PerStage, Simulation
from dlo_lib.parallel.pipeline.table import ActionKind, B, F, I, W

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {F: "#27527f", B: "#3a7d34", I: "#8cd17d", W: "#f1ce63"}  # distinguishable in greyscale
NAMES = {F: "forward", B: "backward", I: "backward, input part", W: "backward, weight part"}
_DARK = {F, B}
_MAX_LABELLED_ACTIONS = 2000  # with more actions, the numbers are too small to read and slow to draw
_MAX_WIDE_ACTIONS = (
    60  # with more of the shortest action side by side, two digits of the larger font do not fit
)


def draw(
    simulation: Simulation,
    *,
    activations: PerStage | None = None,
    for_weights: PerStage = 0.0,
    title: str | None = None,
    unit: str = "",
) -> Figure:
    """Return a figure of ``simulation``.

    Args:
        activations: the memory of one micro-batch on a stage. If given, a second plot shows the memory of
            each rank.
        for_weights: the part of this memory that is kept until the weight gradient.
        title: the title; by default the name, the sizes and the bubble.
        unit: the unit of the time axis.
    """
    height = 0.42 * simulation.schedule.ranks + 1.3
    figure = new_figure(11, height if activations is None else 1.8 * height)
    axes = figure.subplots(1 if activations is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    draw_actions(axes[0], simulation)
    axes[0].set_title(title if title is not None else heading(simulation), loc="left", fontsize=10)
    if activations is not None:
        draw_memory(axes[1], simulation, activations, for_weights)
    axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
    return figure


def heading(simulation: Simulation) -> str:
    """Return the name, the sizes and the bubble of ``simulation`` in one line."""
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.micro_batches} micro-batches, "
        f"makespan {simulation.makespan:.4g}, "
        f"bubble {100 * simulation.bubble_ratio:.0f} % of the ideal time, "
        f"at most {max(simulation.in_flight())} in flight"
    )


def draw_actions(axes: Axes, simulation: Simulation) -> None:
    """Draw the rows of actions into ``axes``. The second and later stages of a rank have a black edge. A
    number that is wider than its bar is left out."""
    from matplotlib.patches import Patch

    from dlo_lib.parallel.pipeline.bar_number import BarNumber

    schedule = simulation.schedule
    number = sum(map(len, schedule.rows)) <= _MAX_LABELLED_ACTIONS
    first_stage = {rank: min(schedule.stages_of(rank), default=0) for rank in range(schedule.ranks)}
    kinds: set[ActionKind] = set()
    shortest = min(
        (end - start for row in simulation.spans for start, end in row if end > start), default=1.0
    )
    size = 9 if simulation.makespan <= _MAX_WIDE_ACTIONS * shortest else 7
    for rank, (row, spans) in enumerate(zip(schedule.rows, simulation.spans)):
        for later in (False, True):
            chosen = [
                (action, span)
                for action, span in zip(row, spans)
                if (action.stage != first_stage[rank]) == later
            ]
            axes.broken_barh(
                [(start, end - start) for _, (start, end) in chosen],
                (rank - 0.42, 0.84),
                facecolors=[COLOURS[action.kind] for action, _ in chosen],
                edgecolors="black" if later else "white",
                linewidth=0.9 if later else 0.5,
            )
        for action, (start, end) in zip(row, spans):
            kinds.add(action.kind)
            if number:
                colour = "white" if action.kind in _DARK else "black"
                axes.add_artist(
                    BarNumber(start, end, rank, str(action.micro_batch), fontsize=size, color=colour)
                )
    axes.set_xlim(0, simulation.makespan or 1)
    handles = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in (F, B, I, W) if kind in kinds]
    if schedule.stages > schedule.ranks:
        handles.append(Patch(facecolor="white", edgecolor="black", label="later stage of the rank"))
    rows_of_ranks(axes, range(schedule.ranks), handles)


def draw_memory(
    axes: Axes, simulation: Simulation, activations: PerStage, for_weights: PerStage = 0.0
) -> None:
    """Draw the memory of each rank over time into ``axes``. Only the last of several changes at one time is
    drawn."""
    for rank, track in enumerate(simulation.memory_tracks(activations, for_weights)):
        held = {**dict(track), simulation.makespan: track[-1][1]}
        axes.step(
            list(held),
            list(held.values()),
            where="post",
            label=f"rank {rank}",
            linewidth=1.2,
            **rank_line(rank),
        )
    axes.set_ylabel("activations held")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if simulation.schedule.ranks <= 10:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)


def as_text(simulation: Simulation, step: float | None = None) -> str:
    """Return the drawing as text: a line for each rank, and a column for each ``step`` of time (by default
    the shortest action).

    An action is written in the column of its start, dots fill the rest of its time, and spaces are bubbles.

    >>> from dlo_lib.parallel.pipeline.schedules import one_f_one_b
    >>> from dlo_lib.parallel.pipeline.simulate import simulate
    >>> print(as_text(simulate(one_f_one_b(2, 2))))
    rank 0  0F0 0F1         0B0 ... 0B1 ...
    rank 1      1F0 1B0 ... 1F1 1B1 ...
    """
    lengths = [end - start for spans in simulation.spans for start, end in spans if end > start]
    step = step or min(lengths, default=1.0)
    width = max((len(str(action)) for row in simulation.schedule.rows for action in row), default=1)
    lines = []
    for rank, (row, spans) in enumerate(zip(simulation.schedule.rows, simulation.spans)):
        columns: dict[int, str] = {}
        for action, (start, end) in zip(row, spans):
            first = round(start / step)
            columns[first] = str(action)
            for column in range(first + 1, round(end / step)):
                columns[column] = "." * width
        cells = [columns.get(column, "").ljust(width) for column in range(1 + max(columns, default=-1))]
        lines.append(f"rank {rank}  " + " ".join(cells).rstrip())
    return "\n".join(lines)
