"""The figures of this lab. Each function draws its arguments.

``dlo_lib.parallel.pipeline.draw`` draws the tables, so that a cell looks the same in every figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    METHODS,
    RANKS,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted
from dlo_lib.parallel.pipeline.draw import draw, draw_actions
from dlo_lib.parallel.pipeline.simulate import Simulation


@styled
def show(run: Simulation, name: str, *, memory: bool = False, for_weights: float = 0.0) -> Figure:
    """Draw a table in time; with ``memory``, also what each rank holds, in micro-batches."""
    table, per_rank = run.schedule, run.schedule.stages // run.schedule.ranks
    most = max(run.peak_memory(1 / per_rank, for_weights / per_rank))
    sizes = f"ranks: {table.ranks}, micro-batches: {table.micro_batches}, peak held: {most:g}"
    bubble = f"bubble {100 * run.bubble_ratio:.0f} % of the ideal time"
    title = f"{name}\n{sizes}; time {run.makespan:.4g}, {bubble}"
    if not memory:
        return _paler(draw(run, title=title), run)
    figure = _paler(draw(run, activations=1 / per_rank, for_weights=for_weights / per_rank, title=title), run)
    below = figure.axes[-1]
    for line, style in zip(below.lines, RANKS):
        line.set(color=style.colour, linestyle=style.dashes, linewidth=1.8)
    if below.get_legend():
        legend(below, "right")
    return figure


def _paler(figure: Figure, run: Simulation) -> Figure:
    """Draw the later stages of each rank in a paler colour, not with a frame."""
    table, axes = run.schedule, figure.axes[0]
    if table.stages == table.ranks:
        return figure
    for later in axes.collections[1::2]:  # each rank has two: its first stage, and the later ones
        later.set(
            facecolor=[_mixed(colour) for colour in later.get_facecolor()],
            edgecolor=BACKGROUND,
            linewidth=0.5,
        )
    for rank, (row, spans) in enumerate(zip(table.rows, run.spans)):
        first = min((action.stage for action in row), default=0)
        middles = {sum(span) / 2 for action, span in zip(row, spans) if action.stage != first}
        for text in axes.texts:
            if text.get_position()[1] == rank and text.get_position()[0] in middles:
                text.set_color(BLACK)
    sample = axes.get_legend()
    sample.legend_handles[-1].set(facecolor=_mixed(to_rgba(BLACK)), edgecolor="none")
    sample.get_texts()[-1].set_text("paler: a later stage\nof the rank")
    return figure


def _mixed(colour: Sequence[float]) -> tuple[float, ...]:
    """Return the colour, mixed with the background."""
    return tuple(0.45 * part + 0.55 * ground for part, ground in zip(colour[:3], to_rgba(BACKGROUND)))


@styled
def until(run: Simulation, name: str, time: float) -> Figure:
    """Draw what has run until ``time``, and what each rank holds, in micro-batches of all its layers."""
    figure = show(run, name, memory=True)
    figure.axes[0].set_title(f"{name} at time {time:g} of {run.makespan:g}")
    for axes in figure.axes[:2]:
        axes.axvspan(time, run.makespan, color=BACKGROUND, zorder=5)
        axes.axvline(time, color=BLACK, linewidth=1, zorder=6)
    return figure


@styled
def bubble_law(ratios: Mapping[int, Mapping[int, float]], predicted: Predicted) -> Figure:
    """Draw the bubble against the number of micro-batches, a line for each number of ranks.

    ``predicted`` has percentages by "8 micro-batches", for 4 ranks.
    """
    (axes,) = panels()
    for (ranks, line), style in zip(ratios.items(), METHODS):
        axes.plot(list(line), list(line.values()), **style.line(marked=True), label=f"{ranks} ranks")
    log_ticks(axes, "x", sorted({count for line in ratios.values() for count in line}))
    log_ticks(axes, "y", [0.01, 0.1, 1, 7], lambda ratio: f"{100 * ratio:g} %", base=10)
    guesses = {
        name: guess / 100 if isinstance(guess, (int, float)) else guess for name, guess in predicted.items()
    }
    mark_predicted(axes, {name: int(name.split()[0]) for name in predicted}, guesses)
    axes.legend()
    title = "Twice the micro-batches halve the share of the bubble"
    return finish(axes, "both", xlabel="micro-batches", ylabel="bubble / ideal time", title=title)


@styled
def sending(ratios: Mapping[str, Mapping[float, float]]) -> Figure:
    """Draw the bubble against the time of a message."""
    (axes,) = panels(height=3.6)
    for (name, line), style in zip(ratios.items(), METHODS):
        percent = [100 * ratio for ratio in line.values()]
        axes.plot(list(line), percent, **style.line(marked=True), label=name)
    axes.set_title("4 ranks, 16 micro-batches: thin stages send more messages")
    axes.legend()
    xlabel = "time of a message (a forward of all layers of a rank takes 1)"
    return finish(axes, "both", xlabel=xlabel, ylabel="bubble (% of ideal)", ylim=(0, None))


@styled
def held_by_rank(held: Mapping[str, Sequence[float]]) -> Figure:
    """Draw what each rank holds, a line for each schedule."""
    (axes,) = panels()
    for (name, line), style in zip(held.items(), METHODS):
        axes.plot(range(len(line)), line, **style.line(marked=True), label=name)
    ranks = len(next(iter(held.values())))
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    legend(axes, "right")
    title = f"{ranks} ranks, 32 micro-batches: your formula"
    return finish(axes, "both", ylabel="micro-batches held", ylim=(0, None), title=title)


@styled
def trade(runs: Mapping[str, Simulation], for_weights: float) -> Figure:
    """Draw the bubble against the memory, a point for each schedule."""
    (axes,) = panels(width=9.5, height=4.2)
    for (name, run), style in zip(runs.items(), METHODS):
        per_rank = run.schedule.stages // run.schedule.ranks
        held = max(run.peak_memory(1 / per_rank, for_weights / per_rank))
        axes.plot(held, 100 * run.bubble_ratio, **style.points(), markersize=10, label=name)
    some = next(iter(runs.values())).schedule
    axes.set_title(f"{some.ranks} ranks, {some.micro_batches} micro-batches, F = I = W")
    legend(axes, "right")
    limits = {"xlim": (0, None), "ylim": (0, None)}
    xlabel = "micro-batches held at most (largest of all ranks)"
    return finish(axes, "both", xlabel=xlabel, ylabel="bubble (% of ideal)", **limits)


@styled
def board(
    entered: Mapping[float, float],
    known: Mapping[str, tuple[float, float]],
    targets: Mapping[float, float],
) -> Figure:
    """Draw the bubble under each cap; known tables (memory, bubble) are points, targets are crosses."""
    (axes,) = panels(width=9.5, height=4.2)
    yours = [100 * ratio for ratio in entered.values()]
    axes.plot(list(entered), yours, color=BLACK, marker=".", label="your table under this cap")
    for (name, (held, ratio)), style in zip(known.items(), METHODS):
        axes.plot(held, 100 * ratio, **style.points(), markersize=10, label=name)
    crosses = [100 * ratio for ratio in targets.values()]
    axes.plot(list(targets), crosses, "x", color=BLACK, markersize=12, markeredgewidth=2, label="target")
    log_ticks(axes, "y", (2, 5, 10, 20, 50, 100, 200), "{:g} %".format, base=10)
    legend(axes, "right")
    title = "4 ranks, 12 micro-batches, F = I = W"
    xlabel = "memory cap (micro-batches)"
    return finish(axes, "both", xlabel=xlabel, ylabel="bubble / ideal time", title=title)


@styled
def planned_and_measured(plan: Simulation, runs: Mapping[str, Simulation], predicted: Predicted) -> Figure:
    """Draw the plan, and below it measured steps, in one scale of time. The times are in seconds.

    ``predicted`` has milliseconds by the names of ``runs``: a diamond shows each on the last rank.
    """
    drawn = {"planned, 1F1B": plan, **{f"measured, {name}": run for name, run in runs.items()}}
    height = (0.42 * plan.schedule.ranks + 0.65) * len(drawn) + 0.5
    every = panels(rows=len(drawn), width=11, height=height, sharex=True)
    end = max(run.makespan for run in drawn.values())
    for axes, (name, run) in zip(every, drawn.items()):
        milliseconds = tuple(tuple((1e3 * start, 1e3 * stop) for start, stop in row) for row in run.spans)
        draw_actions(axes, Simulation(run.schedule, milliseconds))
        title = (
            f"{name}: {1e3 * run.makespan:.0f} ms, bubble {100 * run.bubble_ratio:.0f} % of the ideal time"
        )
        key = name.removeprefix("measured, ")
        mark_predicted(
            axes, {key: run.schedule.ranks - 1}, {key: predicted.get(key)}, horizontal=True, clip_on=False
        )
        axes.set_title(f"{title}; diamond: your prediction" if len(axes.lines) else title)
        if axes is not every[0] and axes.get_legend():
            axes.get_legend().remove()
    guesses = [float(x) for axes in every for line in axes.lines for x in line.get_xdata()]
    axes.set_xlim(0, 1.02 * max(1e3 * end, *guesses, 0))
    axes.set_xlabel("milliseconds")
    return axes.get_figure()
