"""Says where the time and the memory of a plan go, why the obvious plans lose, and draws both.

matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlo_lib.base.drawing import new_figure
from dlo_lib.planner.memory import largest_memory
from dlo_lib.planner.plans import DEGREES, SCHEDULES, Array, Checkpointing, Plans
from dlo_lib.planner.search import GIB, Found, candidates, valid_plans
from dlo_lib.planner.simulated import simulated_step
from dlo_lib.profiling.plot import COLOURS as MEMORY_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#13589A", "#7CC4EE", "#A6A6A6", "#F0B429", "#C25000", "#882255", "#DDA0C4", "#0E8256", "#3B4A6B",
    "#AE4A90", "#80601F", "#000000",
)  # fmt: skip
"""Of the parts of a step, in their order. Distinguishable for colour-blind readers (Okabe and Ito, 2008)."""


def in_words(plans: Plans, row: int) -> str:
    """Return a plan in a few words: its degrees, stage, schedule, micro-batch and checkpointing."""
    p = plans
    degrees = [f"{name} {int(getattr(p, name)[row])}" for name in DEGREES if getattr(p, name)[row] > 1]
    words = degrees or ["one GPU"]
    if p.sequence_parallel[row]:
        words.append("sequence-parallel")
    if p.stage[row]:
        words.append(f"ZeRO {int(p.stage[row])}")
    if p.pp[row] > 1:
        words.append(SCHEDULES[p.schedule[row]].value)
    words.append(f"{int(p.micro_batches[row])} x {int(p.micro_batch[row])} sequences")
    if p.checkpointing[row] == Checkpointing.FULL:
        words.append("checkpointing")
    return ", ".join(words)


def explain(found: Found, row: int = 0) -> list[str]:
    """Return lines: where each millisecond of a step goes, where each GiB of the largest rank goes, and what
    to know about the plan."""
    cost, plans, sizes = found.cost, found.plans, found.request.sizes
    total = float(cost.seconds[row])
    low, high = found.interval(row)
    lines = [
        in_words(plans, row),
        f"step {1e3 * total:.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f}), MFU {100 * cost.mfu[row]:.1f} %",
    ]
    for name, seconds in cost.parts.items():
        if (part := float(seconds[row])) > 0:
            lines.append(f"  {1e3 * part:9.1f} ms  {100 * part / total:5.1f} %  {name}")
    if (schedule := simulated_step(found, row)) is not None:
        lines.append(
            f"the schedule simulated with the stages as they are cut: step {1e3 * schedule.seconds:.0f} ms, "
            f"of which the busiest rank waits {1e3 * schedule.bubble:.0f} ms"
        )
    largest = largest_memory(sizes, plans[np.array([row])], found.request.seq)
    lines.append(f"memory {largest.peak[0] / GIB:.1f} of {found.request.limit / GIB:.1f} GiB")
    for use, held in largest.parts.items():
        if held[0] > 0:
            lines.append(f"  {held[0] / GIB:9.2f} GiB  {use.value}")
    if plans.pp[row] > 1 and plans.tp[row] > 1:
        if found.stack.scatter_gather:
            lines.append(
                "scatter/gather: each rank of tp sends 1/tp of an activation to the next stage; all gather it"
            )
        elif not plans.sequence_parallel[row]:
            lines.append(
                "no scatter/gather: each rank of tp sends the whole activation to the next stage; "
                "with sequence parallelism it sends its part"
            )
    return lines


OBVIOUS = {
    "data parallelism alone": lambda p: (p.stage == 0) & (p.pp == 1) & (p.tp == 1) & (p.cp == 1),
    "sharded parameters alone": lambda p: (p.stage == 3) & (p.pp == 1) & (p.tp == 1) & (p.cp == 1),
    "a pipeline alone": lambda p: (p.pp > 1) & (p.tp == 1) & (p.cp == 1) & (p.copies == 1),
    "tensor parallelism as far as it goes": lambda p: (p.tp == p.tp.max()) & (p.tp > 1),
    "no checkpointing": lambda p: p.checkpointing == Checkpointing.NONE,
    "the largest micro-batch": lambda p: p.micro_batch == p.micro_batch.max(),
}
"""The plans that one tries first, as a mask over candidates."""


def why_others_lose(found: Found) -> dict[str, str]:
    """Return a sentence for each obvious kind of plan: how far its best one is from the best plan, and which
    part of the step costs it the most, or that none fits."""
    request, best = found.request, float(found.cost.seconds[0])
    every = candidates(request)
    every = every[valid_plans(request, every)]
    sentences = {}
    for name, chosen in OBVIOUS.items():
        rows = np.flatnonzero(chosen(found.plans))
        if len(rows):
            sentences[name] = _slower(found, int(rows[0]), best)
            continue
        kind = every[chosen(every)]
        if not len(kind):
            sentences[name] = "no such plan keeps the rules and divides the batch"
        else:
            least = largest_memory(request.sizes, kind, request.seq).peak.min() / GIB
            sentences[name] = f"does not fit: needs {least:.0f} GiB of {request.limit / GIB:.1f}"
    return sentences


def _slower(found: Found, row: int, best: float) -> str:
    seconds = float(found.cost.seconds[row])
    if row == 0:
        return "is the best plan"
    if found.too_close(0, row):
        return f"too close to call: {100 * (seconds / best - 1):.1f} % slower as predicted"
    more = {name: float(part[row] - part[0]) for name, part in found.cost.parts.items()}
    worst = max(more, key=lambda name: more[name])
    return f"{seconds / best:.2f} times the time; most of it: {worst}, {1e3 * more[worst]:.0f} ms more a step"


def plot_plans(found: Found, rows: list[int]) -> Figure:
    """Draw the time of some plans and the memory of their largest rank as stacked bars, with the plans in
    words below."""
    figure = new_figure(11, 4.2 + 0.2 * len(rows))
    time, memory = figure.subplots(1, 2)
    plans = found.plans[np.array(rows)]
    parts = {name: seconds[rows] for name, seconds in found.cost.parts.items()}
    _stacked(time, parts, dict(zip(parts, COLOURS)))
    time.set(ylabel="seconds of a step, predicted", title="time")
    largest = largest_memory(found.request.sizes, plans, found.request.seq)
    held = {part.value: used / GIB for part, used in largest.parts.items()}
    _stacked(memory, held, {part.value: colour for part, colour in MEMORY_COLOURS.items()})
    places = np.arange(len(rows))
    memory.hlines(largest.peak / GIB, places - 0.3, places + 0.3, color="black", label="all at one time")
    memory.axhline(found.request.limit / GIB, color="#C25000", linestyle="--", label="usable")
    memory.set(ylabel="GiB, the peak of each part", title="memory of the largest rank")
    for axes in (time, memory):
        axes.set_xticks(range(len(rows)), [f"plan {row + 1}" for row in rows])
        # The uppermost part of a bar comes first.
        handles, labels = axes.get_legend_handles_labels()
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        axes.legend(handles[::-1], labels[::-1], fontsize=7, frameon=False, **place)
    said = "\n".join(f"plan {row + 1}: {in_words(found.plans, row)}" for row in rows)
    figure.supxlabel(said, fontsize=8, x=0.02, ha="left")
    return figure


def _stacked(axes: Axes, parts: dict[str, Array], colours: dict[str, str]) -> None:
    shown = {name: values for name, values in parts.items() if np.any(values > 0)}
    bottom = np.zeros(len(next(iter(shown.values()))))
    for name, values in shown.items():
        axes.bar(range(len(values)), values, bottom=bottom, label=name, color=colours[name], width=0.6)
        bottom = bottom + values
