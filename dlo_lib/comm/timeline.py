"""A trace as a picture: for each rank what the process did, computing or waiting, and below it what travelled meanwhile.

A bar in the lower lane that lies under blue is communication that computing hides; one under red is what the process waits for. Calls that
are on their way at the same time lie below each other. The time axis is the clock that all ranks of a machine share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dlo_lib.comm.calls import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dlo_lib.comm.trace import Event, Trace

Interval = tuple[float, float]

COMPUTING, WAITING = "#4c78a8", "#b00020"
KINDS = {
    Kind.ALL_REDUCE: "#e69f00",
    Kind.ALL_GATHER: "#009e73",
    Kind.REDUCE_SCATTER: "#cc79a7",
    Kind.ALL_TO_ALL: "#7a5195",
    Kind.SEND: "#56b4e9",
    Kind.RECV: "#8c564b",
}
OTHER = "#999999"
_LANES = 4  # calls of a rank under way at the same time that get a line of their own; further ones share the last


def plot(trace: Trace, title: str | None = None, start: float = 0.0, end: float | None = None) -> Figure:
    """The picture of ``trace`` between ``start`` and ``end`` (seconds since it began; None: to its end), in milliseconds.

    Raises:
        NotTraced: nothing was traced.
        ValueError: ``end`` is not after ``start``.
    """
    from matplotlib import pyplot

    events, last = trace.events, trace.seconds if end is None else end
    if last <= start:
        raise ValueError(f"nothing to draw from {start} s to {last} s: end must be after start")
    ranks = sorted({event.rank for event in events}) or [0]
    figure = pyplot.figure(figsize=(11, 0.95 * len(ranks) + 1.3), layout="constrained")
    pyplot.close(figure)  # a notebook's cell shows what it returns, and would show again what is still open
    axes = figure.subplots()
    for row, rank in enumerate(ranks):
        _draw_rank(axes, row, [event for event in events if event.rank == rank], trace.seconds)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(1e3 * start, 1e3 * last)
    axes.set_xlabel("ms")
    axes.set_title(title if title is not None else _heading(trace), loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(axes, events)
    return figure


def waits(events: Iterable[Event]) -> list[Interval]:
    """When the process stood still for these calls, in seconds; overlapping waits as one."""
    known = sorted((event.waited_from, event.waited_until) for event in events if event.waited_from is not None and event.waited_until)
    joined: list[Interval] = []
    for start, end in known:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def lanes(spans: Sequence[Interval], most: int = _LANES) -> list[int]:
    """A line for each span, ordered by start, so that those which overlap lie on different ones, ``most`` at the most."""
    free: list[float] = []
    chosen = []
    for start, end in spans:
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        if lane == len(free) < most:
            free.append(end)
        lane = min(lane, most - 1)
        free[lane] = max(free[lane], end)
        chosen.append(lane)
    return chosen


def _draw_rank(axes: Axes, row: int, events: list[Event], seconds: float) -> None:
    axes.broken_barh([(0, 1e3 * seconds)], (row - 0.4, 0.36), facecolors=COMPUTING)
    axes.broken_barh(
        [_bar(wait) for wait in waits(events)], (row - 0.4, 0.36), facecolors=WAITING, hatch="xx", edgecolors="white", linewidth=0
    )
    spans = [(event.issued, event.over if event.over is not None else seconds) for event in events]
    lane_of = lanes(spans)
    height = 0.36 / (1 + max(lane_of, default=0))
    bars: dict[tuple[Kind, int, bool], list[Interval]] = defaultdict(list)
    for event, span, lane in zip(events, spans, lane_of):
        bars[event.call.kind, lane, event.done is None].append(_bar(span))
    for (kind, lane, bound), group in bars.items():
        place = (row + 0.02 + lane * height, 0.88 * height)
        axes.broken_barh(
            group,
            place,
            facecolors=_colour(kind),
            alpha=0.55 if bound else 1,
            edgecolors="white",
            linewidth=0.4,
            hatch="//" if bound else "",
        )


def _bar(span: Interval) -> Interval:
    """Start and length in milliseconds."""
    return 1e3 * span[0], 1e3 * (span[1] - span[0])


def _colour(kind: Kind) -> str:
    return KINDS.get(Kind.RECV if kind is Kind.RECV_ANY else kind, OTHER)


def _heading(trace: Trace) -> str:
    share = trace.hidden()
    bound = "at most " if any(event.done is None for event in trace.events) else ""
    told = "" if share is None else f", {bound}{share:.0%} of the communication hidden"
    return f"{trace.count()} calls in {1e3 * trace.seconds:.1f} ms{told}"


def _legend(axes: Axes, events: list[Event]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COMPUTING, label="computing"), Patch(facecolor=WAITING, hatch="xx", edgecolor="white", label="waiting")]
    names: dict[str, list[str]] = defaultdict(list)
    for kind in sorted({event.call.kind for event in events}, key=lambda kind: kind.value):
        names[_colour(kind)].append(kind.value.replace("_", "-"))
    handles += [Patch(facecolor=colour, label=", ".join(kinds)) for colour, kinds in names.items()]
    if any(event.done is None for event in events):
        handles.append(Patch(facecolor="#dddddd", hatch="//", edgecolor="white", label="over by then, at the latest"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
