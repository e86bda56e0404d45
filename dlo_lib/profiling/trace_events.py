"""Analysis of the events of a trace, in the format of ``torch.profiler`` that Perfetto and Chrome open.

A trace is a JSON file with a list ``traceEvents``. A *complete* event (``"ph": "X"``) has a name, a start
``ts`` and a duration ``dur`` in microseconds, and a track: a thread of the CPU, or a stream of a GPU. Other
events (names of tracks, arrows, instants) take no time.

The events of one thread are nested: an operator contains the operators that it calls. Its *self time* is its
duration without them, so that the self times of a thread add up to the time that it is busy. Events of
different tracks run at the same time. Their durations do not add up, so the time of several tracks is the
length of the *union* of their intervals, and the time in which A and B are both busy is

    overlap = |A| + |B| - |A or B|.

Cost: sorting, n log n for n events.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError

STEP = "ProfilerStep"
"""How the names of the events begin that ``torch.profiler`` writes for each step."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class TraceEvent:
    """One complete event.

    Attributes:
        name: of the operator, the region or the kernel.
        category: "cpu_op", "user_annotation" (a region of ``record_function``), "kernel", "gpu_memcpy", ...
        begin, seconds: its start and its duration, in seconds; the first event of the trace begins at 0.
        track: the process and the thread or stream.
    """

    name: str
    category: str
    begin: float
    seconds: float
    track: tuple[str, str]

    @property
    def end(self) -> float:
        """The end, in seconds."""
        return self.begin + self.seconds

    @property
    def interval(self) -> Interval:
        """Start and end, in seconds."""
        return self.begin, self.end


def read_trace(file: str | Path) -> list[TraceEvent]:
    """Return the complete events of a trace (``.json`` or ``.json.gz``), by start; of events that start
    together, the longer one is first, because it contains the others.

    Raises:
        UserError: there is no such file, or it is not a trace.
    """
    path = Path(file)
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        rows = trace["traceEvents"] if isinstance(trace, dict) else trace
        found = [row for row in rows if row.get("ph") == "X" and row.get("cat") != "Trace"]
        first = min((row["ts"] for row in found), default=0.0)
        events = [
            TraceEvent(
                row["name"],
                row.get("cat", ""),
                (row["ts"] - first) / 1e6,
                row.get("dur", 0.0) / 1e6,
                (str(row.get("pid")), str(row.get("tid"))),
            )
            for row in found
        ]
    except FileNotFoundError as error:
        raise UserError(f"there is no trace {path}: write it with export_chrome_trace") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError) as error:
        raise UserError(
            f"{path} is not a trace of torch.profiler: give a file of export_chrome_trace"
        ) from error
    return sorted(events, key=lambda event: (event.begin, -event.seconds))


def main_track(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the events of the thread that runs the steps.

    Raises:
        UserError: the trace has no steps.
    """
    every = list(events)
    tracks = [event.track for event in every if event.name.startswith(STEP)]
    if not tracks:
        raise UserError("the trace has no steps: call profiler.step() after each training step")
    return [event for event in every if event.track == tracks[0]]


def self_times(events: Sequence[TraceEvent]) -> list[float]:
    """Return the self time of each event in seconds: its duration without the events directly within it.

    Args:
        events: sorted as ``read_trace`` returns them; only events of the same track contain each other.
    """
    own = [event.seconds for event in events]
    open_events: dict[tuple[str, str], list[int]] = {}
    for number, event in enumerate(events):
        stack = open_events.setdefault(event.track, [])
        while stack and events[stack[-1]].end <= event.begin:
            stack.pop()
        if stack:
            own[stack[-1]] -= event.seconds
        stack.append(number)
    return [max(0.0, seconds) for seconds in own]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    return sum(end - begin for begin, end in union(intervals))


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Return the time that intervals of ``a`` and of ``b`` both cover."""
    one, other = list(a), list(b)
    return covered(one) + covered(other) - covered([*one, *other])


def phase_times(events: Iterable[TraceEvent], phases: Sequence[str]) -> dict[str, float]:
    """Return the mean seconds of each phase in a step, and ``"other"``: the rest of the step.

    Args:
        phases: names of ``record_function`` regions of the thread that runs the steps. Regions outside of
            the steps do not count.

    Raises:
        UserError: the trace has no steps.
    """
    main = main_track(events)
    steps = [event for event in main if event.name.startswith(STEP)]
    sums = {
        name: overlap((event.interval for event in main if event.name == name), (s.interval for s in steps))
        for name in phases
    }
    rest = sum(step.seconds for step in steps) - sum(sums.values())
    return {name: seconds / len(steps) for name, seconds in (sums | {"other": rest}).items()}
