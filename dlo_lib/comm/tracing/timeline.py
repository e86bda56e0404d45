"""A trace as a timeline: for each rank, whether the process computes or waits, and the calls in flight.

A bar in the lower lane below blue is communication hidden by computation; the process waits for a bar below
red. A thin line before a bar is a call that some other rank has not made yet: no data moves. Calls that
overlap in time are drawn below each other, in at most four lanes; further calls share one lane. The time axis
is the clock that all ranks of a machine share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlo_lib.base.drawing import new_figure, rows_of_ranks
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.events import Event

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Interval = tuple[float, float]

COMPUTING, WAITING = "#44709f", "#b00020"
KINDS = {
    Kind.ALL_REDUCE: "#f0b429",
    Kind.ALL_GATHER: "#0e8256",
    Kind.REDUCE_SCATTER: "#dda0c4",
    Kind.ALL_TO_ALL: "#7a5195",
    Kind.SEND: "#7cc4ee",
    Kind.RECV: "#8c564b",
}
OTHER, FURTHER, BOUND = "#a6a6a6", "#444444", "#dddddd"
LANES = 4
"""Number of overlapping calls of a rank that get separate lanes."""
_SMALLEST = 1 / 1500
"""Fraction of the width: shorter bars are drawn with this length, and bars closer than this are joined."""


@dataclass(frozen=True)
class Picture:
    """What is drawn of a trace: its events, the span of each rank's trace, and its length, in seconds."""

    events: Sequence[Event]
    spans: Mapping[int, Interval]
    seconds: float


def plot(trace: Picture, title: str, start: float = 0.0, end: float | None = None) -> Figure:
    """Draw ``trace`` between ``start`` and ``end`` (seconds since its start; None: its end), in milliseconds.

    Raises:
        ValueError: ``end`` is not after ``start``.
    """
    events, last = trace.events, trace.seconds if end is None else end
    if last <= start:
        raise ValueError(f"nothing to draw from {start} s to {last} s: end must be after start")
    ranks = sorted({event.rank for event in events} | set(trace.spans)) or [0]
    figure = new_figure(11, 0.95 * len(ranks) + 1.3)
    axes = figure.subplots()
    further = False
    for row, rank in enumerate(ranks):
        span = trace.spans.get(rank, (0.0, trace.seconds))
        further |= _draw_rank(
            axes, row, [event for event in events if event.rank == rank], span, _SMALLEST * (last - start)
        )
    rows_of_ranks(axes, ranks, _legend(events, further))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(1e3 * start, 1e3 * last)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    return figure


def waits(events: Iterable[Event]) -> list[Interval]:
    """Return the intervals of waiting for these calls, in seconds; overlapping waits are joined."""
    return joined(
        (event.waited_from, event.waited_until)
        for event in events
        if event.waited_from is not None and event.waited_until
    )


def joined(spans: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return ``spans`` in order; spans that are no further apart than ``gap`` seconds are joined."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def lanes(spans: Sequence[Interval], most: int = LANES) -> list[int]:
    """Return a lane for each span (ordered by start).

    Overlapping spans differ. ``most`` means that none is free.
    """
    free: list[float] = []
    chosen = []
    for start, end in spans:
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        if lane == len(free) < most:
            free.append(end)
        if lane < most:
            free[lane] = end
        chosen.append(lane)
    return chosen


def _draw_rank(axes: Axes, row: int, events: list[Event], span: Interval, smallest: float) -> bool:
    """Draw the row of a rank.

    Join bars closer than ``smallest`` seconds. Return whether lanes were missing.
    """
    axes.broken_barh([_bar(span)], (row - 0.4, 0.36), facecolors=COMPUTING)
    stood = joined(waits(events), smallest)
    axes.broken_barh(
        [_bar(wait) for wait in stood],
        (row - 0.4, 0.36),
        facecolors=WAITING,
        hatch="xx",
        edgecolors="white",
        linewidth=0,
    )
    spans = [(event.issued, event.over if event.over is not None else span[1]) for event in events]
    lane_of = lanes(spans)
    height = 0.38 / (1 + max(lane_of, default=0))
    early: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    bars: dict[tuple[str, int, bool], list[Interval]] = defaultdict(list)
    for event, (issued, over), lane in zip(events, spans, lane_of):
        colour = _colour(event.call.kind) if lane < LANES else FURTHER
        early[colour, lane].append((issued, event.begun))
        bars[colour, lane, event.done is None and lane < LANES].append(
            (event.begun, max(over, event.begun + smallest))
        )
    for (colour, lane), group in early.items():
        lines = [_bar(line) for line in joined(group, smallest)]
        axes.broken_barh(lines, (row + (lane + 0.4) * height, 0.12 * height), facecolors=colour, linewidth=0)
    for (colour, lane, bound), group in bars.items():
        shown = [_bar(bar) for bar in joined(group, smallest if lane < LANES else 0.0)]
        place = (row + (lane + 0.06) * height, 0.88 * height)
        alpha, hatch = (0.55, "//") if bound else (1.0, "")
        axes.broken_barh(
            shown, place, facecolors=colour, linewidth=0, alpha=alpha, hatch=hatch, edgecolors="white"
        )
    return any(lane >= LANES for lane in lane_of)


def _bar(span: Interval) -> Interval:
    """Return start and length in milliseconds."""
    return 1e3 * span[0], 1e3 * (span[1] - span[0])


def _colour(kind: Kind) -> str:
    return KINDS.get(Kind.RECV if kind is Kind.RECV_ANY else kind, OTHER)


def _legend(events: Sequence[Event], further: bool) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [Patch(facecolor=COMPUTING, label="computing")]
    handles.append(Patch(facecolor=WAITING, hatch="xx", edgecolor="white", label="waiting"))
    names: dict[str, list[str]] = defaultdict(list)
    for kind in sorted({event.call.kind for event in events}, key=lambda kind: kind.value):
        names[_colour(kind)].append(kind.value.replace("_", "-"))
    handles += [Patch(facecolor=colour, label=", ".join(kinds)) for colour, kinds in names.items()]
    if further:
        handles.append(Patch(facecolor=FURTHER, label="further calls"))
    if any(event.all_called is not None for event in events):
        handles.append(Line2D([], [], color=OTHER, linewidth=1.2, label="not yet called by all"))
    if any(event.done is None for event in events):
        handles.append(Patch(facecolor=BOUND, hatch="//", edgecolor="white", label="upper bound of the end"))
    return handles
