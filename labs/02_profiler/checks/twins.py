"""Drawn traces, and what the functions should find in them: moment by moment, without a stack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from dlo_lib.grading.checks.twins import twin

Span = dict[str, Any]
MAIN, LOADER = 17, 23
OPERATORS = ("aten::linear", "aten::mul", "aten::addmm", "aten::view", "aten::relu")
KIND_NAMES = ("conversion", "read", "operator", "python")


def within(t, begin: int, end: int, depth: int, names: tuple[str, ...]) -> list[Span]:
    """Draw spans one after another in [begin, end) ms of the main track, with shorter ones within; some are
    direct neighbours."""
    found: list[Span] = []
    now = begin + t.integer(0, 1)
    while now < end:
        stop = min(end, now + t.integer(2, 6))
        if (now, stop) == (begin, end):
            stop -= 1
        if stop <= now:
            break
        found.append({"name": t.choice(names), "track": MAIN, "begin": now, "end": stop})
        if depth and stop - now > 1:
            found += within(t, now, stop, depth - 1, names)
        now = stop + t.integer(0, 1)
    return found


def ordered(spans: list[Span]) -> list[Span]:
    """The spans as the exercise sorts them."""
    return sorted(spans, key=lambda span: (span["begin"], -span["end"]))


def drawn_steps(
    t, count: int, phases: Sequence[str], names: tuple[str, ...] = OPERATORS, start: int = 0
) -> list[Span]:
    """Draw steps with phases, each with operators; there is time between the steps and between the phases."""
    found: list[Span] = []
    now = start
    for number in range(count):
        begin, now = now, now + t.integer(1, 2)
        for name in phases:
            stop = now + t.integer(3, 8)
            found.append({"name": name, "track": MAIN, "begin": now, "end": stop})
            found += within(t, now, stop, 1, names)
            now = stop + t.integer(1, 2)
        found.append({"name": f"ProfilerStep#{number + 2}", "track": MAIN, "begin": begin, "end": now})
        now += t.integer(1, 3)
    return ordered(found)


def elsewhere(spans: list[Span], track: int = LOADER) -> list[Span]:
    """The same spans on another track, half a ms later, without the steps."""
    moved = [dict(span, track=track, begin=span["begin"] + 0.5, end=span["end"] + 0.5) for span in spans]
    return [span for span in moved if not span["name"].startswith("ProfilerStep")]


@twin
def trace_of(spans: list[Span], first: int) -> dict[str, Any]:
    """A trace with these spans, which begins at `first` microseconds, and with events of other kinds."""

    def event(cat: str, name: str, tid: Any, ts: int, dur: int) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur}

    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        event("Trace", "PyTorch Profiler (0)", "PyTorch Profiler", first - 2500, 900000),
        event("gpu_user_annotation", "forward", 7, first - 1000, 5000),
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "tid": MAIN, "ts": first - 1500, "id": 1},
        {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "tid": "", "ts": first - 2500, "s": "g"},
    ]
    for span in spans:
        begin, length = first + 1000 * span["begin"], 1000 * (span["end"] - span["begin"])
        events.append(event("cpu_op", span["name"], span["track"], begin, length))
    return {"schemaVersion": 1, "traceEvents": events}


def contains(outer: Span, inner: Span) -> bool:
    """Whether `inner` is another span, of the same track and within `outer`."""
    same = outer is not inner and outer["track"] == inner["track"]
    return same and outer["begin"] <= inner["begin"] and inner["end"] <= outer["end"]


def around(spans: list[Span], span: Span) -> list[int]:
    """The spans that contain a span, the longest first."""
    found = [number for number, outer in enumerate(spans) if contains(outer, span)]
    return sorted(found, key=lambda number: spans[number]["begin"] - spans[number]["end"])


@twin
def parents_of(spans: list[Span]) -> list[int | None]:
    """The parent of each span."""
    return [(around(spans, span) or [None])[-1] for span in spans]


@twin
def popped_once(spans: list[Span]) -> list[int | None]:
    """The parents that a stack finds if at most one span is closed before the next one begins."""
    found: list[int | None] = []
    stacks: dict[Any, list[int]] = {}
    for number, span in enumerate(spans):
        stack = stacks.setdefault(span["track"], [])
        if stack and spans[stack[-1]]["end"] <= span["begin"]:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(number)
    return found


def neighbours(spans: list[Span]) -> bool:
    """Whether a span begins where another one of its track ends that is not its parent."""
    ends = {(span["track"], span["end"]) for span in spans}
    return any((span["track"], span["begin"]) in ends for span in spans)


@twin
def own_times(spans: list[Span], mistake: str = "") -> list[float]:
    """The self times; with the mistake "all" each span subtracts itself from all spans around it."""
    if mistake == "all":
        found = [span["end"] - span["begin"] for span in spans]
        for span in spans:
            for number in around(spans, span):
                found[number] -= span["end"] - span["begin"]
        return [float(value) for value in found]
    # Each half ms of a track belongs to the shortest span that covers it.
    found = [0.0] * len(spans)
    halves = [range(int(2 * span["begin"]), int(2 * span["end"])) for span in spans]
    for track, half in {(span["track"], half) for span, each in zip(spans, halves) for half in each}:
        covering = [n for n, span in enumerate(spans) if span["track"] == track and half in halves[n]]
        found[min(covering, key=lambda n: spans[n]["end"] - spans[n]["begin"])] += 0.5
    return found


def steps_of(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span["name"].startswith("ProfilerStep")]


@twin
def times_of(spans: list[Span], phases: Sequence[str], mistake: str = "") -> dict[str, float]:
    """The mean ms of each phase in a step. Mistakes: "sum" of all steps, "last" occurrence only, "anywhere",
    "between" (and in) the steps, "tracks", and "phases" (divided by occurrences)."""
    steps, found = steps_of(spans), {}
    within = steps
    if mistake == "between":
        within = [dict(steps[0], end=steps[-1]["end"])]
    for name in phases:
        lengths = [
            span["end"] - span["begin"]
            for span in spans
            if span["name"] == name
            and (mistake == "anywhere" or any(s["begin"] <= span["begin"] < s["end"] for s in within))
            and (mistake in ("anywhere", "tracks") or span["track"] == MAIN)
        ]
        count = {"sum": 1, "phases": max(1, len(lengths))}.get(mistake, len(steps))
        found[name] = (sum(lengths[-1:]) if mistake == "last" else sum(lengths)) / count
    found["other"] = sum(step["end"] - step["begin"] for step in steps) / len(steps) - sum(found.values())
    return found


@twin
def kinds_of(spans: list[Span], kinds: dict[str, str], mistake: str = "") -> dict[str, float]:
    """The mean ms of each kind. Mistakes: "by name" (no span inherits), "direct" (only from the parent),
    "operators" (pass their kind on, too), "durations" (not self times), "anywhere" (also outside of steps),
    "sum" (of all steps)."""
    steps, own = steps_of(spans), own_times(spans)
    if mistake == "durations":
        own = [float(span["end"] - span["begin"]) for span in spans]
    found = dict.fromkeys(KIND_NAMES, 0.0)
    for span, value in zip(spans, own):
        chain = [spans[number] for number in around(spans, span)] + [span]
        if mistake != "anywhere" and not steps_of(chain):
            continue
        names = [each["name"] for each in chain][{"by name": -1, "direct": -2}.get(mistake, 0) :]
        if mistake == "operators":
            names = [name for name in names if name in kinds or name.startswith("aten::")][:1]
        special = next((kinds[name] for name in names if name in kinds), None)
        name = names[0] if mistake == "operators" and names else span["name"]
        found[special or ("operator" if name.startswith("aten::") else "python")] += value
    return {kind: value / (1 if mistake == "sum" else len(steps)) for kind, value in found.items()}


def runs_of(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The separate runs that intervals cover together."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(found.pop()[1], end)
        found.append((begin, end))
    return found


@twin
def ticks(intervals: list[tuple[float, float]]) -> set[int]:
    """The quarters of a ms that intervals cover; their ends are multiples of a quarter."""
    return {tick for begin, end in intervals for tick in range(math.floor(4 * begin), math.floor(4 * end))}


@twin
def flops_of(sizes: list[int], batch: int, products: tuple[int, int] = (2, 3)) -> int:
    """The FLOPs of the products of a step: `products` in the first layer, and in each other one."""
    first, other = products
    layers = enumerate(itertools.pairwise(sizes))
    return sum(2 * batch * m * n * (other if place else first) for place, (m, n) in layers)
