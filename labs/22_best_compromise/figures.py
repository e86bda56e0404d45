"""The figures of this lab: each function draws its arguments."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlo_lib.labkit.figures import (
    BLACK,
    BLUE,
    GIB,
    GREEN,
    LIMIT,
    METHODS,
    MUTED,
    SKY,
    SMALL,
    VERMILLION,
    WINE,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)
from dlo_lib.planner import Rated
from dlo_lib.planner.explain import COLOURS as TIME_COLOURS
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS as MEMORY_COLOURS

MINE = (BLUE, SKY, VERMILLION, GREEN, WINE)
"""Of the student's parts: of memory, and of time."""


@styled
def needs(gib: dict[str, float], limit: float) -> Figure:
    """The memory that a rank needs in each plan, and what an H100 has, on a logarithmic axis."""
    (ax,) = panels(width=9, height=2.6)
    for row, (value, method) in enumerate(zip(gib.values(), METHODS)):
        ax.barh(row, value, 0.6, color=method.colour)
        ax.text(value * 1.05, row, f"{value:.0f} GiB", va="center")
    ax.axvline(limit, color=LIMIT, linestyle="--")
    ax.text(limit * 1.03, -0.75, "usable on an H100", color=LIMIT, fontsize=SMALL, va="center")
    ax.set_yticks(range(len(gib)), list(gib))
    ax.set_ylim(len(gib) - 0.5, -1.1)
    log_ticks(ax, "x", [16, 64, 256, 1024])
    return finish(ax, "x", xlabel="GiB on the largest rank (logarithmic)", xlim=(8, 4096))


def _stack(ax: Axes, parts: dict[str, float], colours: dict[str, str]) -> None:
    left = 0.0
    for name, value in parts.items():
        if value > 0:
            ax.barh(0, value, 0.6, left=left, color=colours[name], label=name)
        left += value


@styled
def plan(found: Rated, chosen: dict[str, int], limit: float) -> Figure:
    """The memory of the largest rank and the time of a step of one plan, each as a bar of its parts."""
    memory, time = panels(1, 2, width=10, height=4.6)
    held = {name: value / GIB for name, value in (found.memory_parts or {}).items()}
    shares = found.memory / GIB / max(sum(held.values()), 1e-9)
    _stack(memory, {name: value * shares for name, value in held.items()}, _memory_colours())
    memory.axvline(limit, color=LIMIT, linestyle="--", label="usable")
    _stack(time, found.time_parts or {}, dict(zip(found.time_parts or {}, TIME_COLOURS)))
    verdict = "does not fit" if found.memory / GIB > limit else f"MFU {100 * found.mfu:.1f} %"
    degrees = f"p {chosen['pp']}, t {chosen['tp']}, d {chosen['dp']}"
    memory.set_title(f"{degrees}: {found.memory / GIB:.0f} GiB")
    time.set_title(f"{found.seconds:.1f} s a step, {verdict}")
    for ax in (memory, time):
        ax.set_yticks([])
        legend(ax, "right", fontsize=SMALL)
    finish(
        memory,
        "x",
        xlabel="GiB, each part in its share of the peak",
        xlim=(0, max(120, 1.05 * found.memory / GIB)),
    )
    return finish(time, "x", xlabel="seconds", xlim=(0, max(40, 1.05 * found.seconds)))


def _memory_colours() -> dict[str, str]:
    return {part.value: MEMORY_COLOURS[part] for part in Part if part in MEMORY_COLOURS}


@styled
def bubbles(by_tp: dict[int, float], by_dp: dict[int, float], printed: dict[int, float]) -> Figure:
    """The bubble against the tensor-parallel degree, and against the copies, with a wrong formula beside."""
    left, right = panels(2, width=10, height=3.6)
    left.plot(list(by_tp), list(by_tp.values()), **METHODS[0].line(marked=True))
    right.plot(list(by_dp), list(by_dp.values()), label="b (n - d) / B", **METHODS[0].line(marked=True))
    right.plot(list(printed), list(printed.values()), label="as printed", **METHODS[1].line(marked=True))
    legend(right, "above")
    right.set_ylim(0, 1)  # the printed one rises to 16
    for ax, label in ((left, "tensor-parallel degree t (d = 1)"), (right, "copies d (t = 1)")):
        log_ticks(ax, "x", [1, 4, 16, 64, 256])
        figure = finish(ax, "both", xlabel=label, ylabel="bubble / computing time")
    return figure


@styled
def traffic(sent: dict[str, dict[str, float]]) -> Figure:
    """The elements that an inner rank sends in a step for each form of parallelism, by plan."""
    (ax,) = panels(width=9.5, height=3.6)
    names = list(next(iter(sent.values())))
    for place, (name, method) in enumerate(zip(names, METHODS)):
        heights = [values[name] / 1e9 for values in sent.values()]
        spots = [row + 0.27 * (place - 1) for row in range(len(sent))]
        ax.bar(spots, heights, 0.25, color=method.colour, label=name)
        for spot, height in zip(spots, heights):
            ax.text(
                spot,
                height * 1.1 if height else 0.12,
                f"{height:.0f}" if height >= 10 else f"{height:.2g}",
                ha="center",
                fontsize=SMALL,
            )
    ax.set_xticks(range(len(sent)), list(sent))
    log_ticks(ax, "y", [0.1, 1, 10, 100, 1000, 10_000], base=10)
    legend(ax, "above")
    return finish(ax, ylabel="10⁹ elements a step", ylim=(0.1, 20_000))


def _mine(ax: Axes, rows: dict[str, dict[str, float]], unit: float, planner: dict[str, float]) -> None:
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for (name, value), colour in zip(parts.items(), MINE):
            ax.barh(row, value / unit, 0.6, left=left, color=colour, label=name if row == 0 else None)
            left += value / unit
    spots = [value / unit for value in planner.values()]
    look = {"linestyle": "", "marker": "D", "color": BLACK, "markersize": 7, "markerfacecolor": "white"}
    ax.plot(spots, range(len(rows)), label="the planner", zorder=5, **look)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    legend(ax, "above", ncols=6)


@styled
def memory(mine: dict[str, dict[str, float]], planner: dict[str, float], limit: float) -> Figure:
    """The parts of your memory of each plan as bars, the planner's peak as a diamond, up to 300 GiB."""
    (ax,) = panels(width=10, height=3.8)
    _mine(ax, mine, GIB, planner)
    ax.axvline(limit / GIB, color=LIMIT, linestyle="--")
    for row, parts in enumerate(mine.values()):
        if (total := sum(parts.values()) / GIB) > 300:
            told = f"{total:.0f} GiB, the planner {list(planner.values())[row] / GIB:.0f}"
            ax.text(298, row, told, ha="right", va="center", color="white")
    return finish(ax, "x", xlabel="GiB (dashed: usable on an H100)", xlim=(0, 300))


@styled
def times(mine: dict[str, dict[str, float]], planner: dict[str, float]) -> Figure:
    """The parts of your time of a step of each plan as bars, and the planner's time as a diamond."""
    (ax,) = panels(width=10, height=3.8)
    _mine(ax, mine, 1, planner)
    most = max([*planner.values(), *(sum(parts.values()) for parts in mine.values())])
    return finish(ax, "x", xlabel="seconds of a step", xlim=(0, 1.05 * most))
