"""A schedule as a picture: time to the right, a row for each rank, colours by kind, the number of the micro-batch, bubbles left white.

The same drawing shows the plan (``simulate``) and what was measured (``runtime`` gives spans of the same form), so the two can be laid one
above the other. Below, if asked for, what each rank holds over time. ``as_text`` is the same for a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_lib.drawing import new_figure, rows_of_ranks
from dlo_lib.parallel.pipeline.simulate import PerStage, Simulation
from dlo_lib.parallel.pipeline.table import ActionKind, B, F, I, W

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {F: "#4c78a8", B: "#59a14f", I: "#8cd17d", W: "#f1ce63"}  # also told apart in grey
NAMES = {F: "forward", B: "backward", I: "backward, input part", W: "backward, weight part"}
_DARK = {F, B}
_MOST_NUMBERS = 2000  # beyond, numbers are too small to read and slow to draw


def draw(
    simulation: Simulation, *, activations: PerStage | None = None, for_weights: PerStage = 0.0, title: str | None = None, unit: str = ""
) -> Figure:
    """The picture of ``simulation``.

    Args:
        activations: what a micro-batch holds on a stage; given, a track of each rank's memory is drawn below.
        for_weights: what of it stays until the weight part.
        title: by default name, ranks, micro-batches and bubble.
        unit: of the time axis.
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
    """Name, size and bubble in one line."""
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.micro_batches} micro-batches, makespan {simulation.makespan:.4g}, "
        f"bubble {100 * simulation.bubble_ratio:.0f} % of the ideal time, at most {max(simulation.in_flight())} in flight"
    )


def draw_actions(axes: Axes, simulation: Simulation) -> None:
    """The rows of actions into ``axes``. A rank's second and later stages have a thick edge."""
    from matplotlib.patches import Patch

    schedule = simulation.schedule
    number = sum(map(len, schedule.rows)) <= _MOST_NUMBERS
    first_stage = {rank: min(schedule.stages_of(rank), default=0) for rank in range(schedule.ranks)}
    kinds: set[ActionKind] = set()
    for rank, (row, spans) in enumerate(zip(schedule.rows, simulation.spans)):
        for later in (False, True):
            chosen = [(action, span) for action, span in zip(row, spans) if (action.stage != first_stage[rank]) == later]
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
                axes.text(
                    (start + end) / 2, rank, str(action.micro_batch), ha="center", va="center", fontsize=7, color=colour, clip_on=True
                )
    axes.set_xlim(0, simulation.makespan or 1)
    handles = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in (F, B, I, W) if kind in kinds]
    if schedule.stages > schedule.ranks:
        handles.append(Patch(facecolor="white", edgecolor="black", label="later stage of the rank"))
    rows_of_ranks(axes, range(schedule.ranks), handles)


def draw_memory(axes: Axes, simulation: Simulation, activations: PerStage, for_weights: PerStage = 0.0) -> None:
    """What each rank holds, over time, into ``axes``. What is let go at the moment when as much is taken leaves no notch."""
    for rank, track in enumerate(simulation.memory_tracks(activations, for_weights)):
        held = {**dict(track), simulation.makespan: track[-1][1]}  # of several changes at one moment the last one stays
        axes.step(list(held), list(held.values()), where="post", label=f"rank {rank}", linewidth=1.2)
    axes.set_ylabel("activations held")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if simulation.schedule.ranks <= 10:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def as_text(simulation: Simulation, step: float | None = None) -> str:
    """The picture in characters: a line for each rank, a column for each ``step`` of time (by default the shortest action).

    An action stands where it begins and dots fill the rest of its time; spaces are bubbles.

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
