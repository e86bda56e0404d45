"""The visible checks of the functions that read a trace: on drawn traces whose times are whole ms."""

from __future__ import annotations

from typing import Any

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, near, wrong_if

from .scenarios import reads_of_spans
from .twins import (
    KIND_NAMES,
    LOADER,
    MAIN,
    OPERATORS,
    Span,
    around,
    drawn_steps,
    elsewhere,
    kinds_of,
    ordered,
    own_times,
    parents_of,
    popped_once,
    ticks,
    times_of,
    trace_of,
    within,
)

PHASES = ("load", "forward", "backward")

# -- 1 · spans


def spans_of(student, t, count: int = 2) -> tuple[list[Any], list[Span]]:
    """What the student reads in a shuffled trace, and the drawn spans."""
    steps = drawn_steps(t, count, PHASES[:2], start=t.integer(2, 5))
    want = ordered([*steps, *elsewhere(steps)])
    first = t.integer(10**6, 10**9)
    got = student.read_spans(trace_of(t.shuffled(want), first))
    t.that(type(got) is list, "read_spans(...) should return a list of dicts")
    for span in got:
        t.that(
            type(span) is dict and {"name", "track", "begin", "end"} <= set(span),
            "each span should be a dict with name, track, begin and end",
        )
    return got, want


def names_in(spans: list[Any]) -> list[tuple[str, str]]:
    return sorted((str(span["name"]), str(span["track"])) for span in spans)


@check("spans", points=1)
def check_complete(student, t):
    "The complete events, and only these"
    got, want = spans_of(student, t)
    names = [span["name"] for span in got]
    t.that("PyTorch Profiler (0)" not in names, 'The event of the profiler itself is in the list: leave out the category "Trace".')
    t.that(
        not any(span["track"] == 7 for span in got),
        "A region is in the list a second time, on the track of a GPU: leave out the category gpu_user_annotation.",
    )
    message = "read_spans(...) has {got} spans, expected {want}: one for each event of the kind X that is work"
    t.that(len(got) == len(want), message, got=len(got), want=len(want))
    t.that(names_in(got) == names_in(want), "the names or tracks of the spans are not those of the events")


def times_in(t, spans: list[Any]) -> list[float]:
    numbers = [[t.number(span[key], "a time of a span") for key in ("begin", "end")] for span in spans]
    return [value for pair in sorted(numbers) for value in pair]


@check("spans", points=1)
def check_milliseconds(student, t):
    "Times in ms; the earliest span begins at 0"
    got, want = spans_of(student, t)
    t.that(len(got) == len(want), "not tested yet: there are too many or too few spans")
    found, first = times_in(t, got), want[0]["begin"]
    right = times_in(t, [dict(span, begin=span["begin"] - first, end=span["end"] - first) for span in want])
    mistakes = {
        "The times are microseconds, as in the file: divide by 1000.": [1000 * value for value in right],
        "The times are seconds: a ms is 1000 microseconds.": [value / 1000 for value in right],
        "The times begin at the event of the profiler, which is no span.": [value + first + 2.5 for value in right],
        "The times begin at an event that is no span, the copy of a region on the track of a GPU.": [
            value + first + 1.0 for value in right
        ],
        "`end` is the duration: add it to `begin`.": times_in(
            t, [dict(span, begin=span["begin"] - first, end=span["end"] - span["begin"]) for span in want]
        ),
    }
    wrong_if(t, found, right, mistakes, atol=1e-4)
    t.that(abs(min(found[::2]) - 0.0) < 1e-4, "the earliest span begins at {got:.3f} ms, not at 0", got=min(found[::2]))
    t.that(near(found, right, atol=1e-4), "the times of the spans are not those of the events in ms")


@check("spans", points=1)
def check_order(student, t):
    "Sorted by begin; of spans that begin together, the longer one first"
    got, want = spans_of(student, t)
    t.that(len(got) == len(want), "not tested yet: there are too many or too few spans")
    begins = [t.number(span["begin"], "a time of a span") for span in got]
    t.that(begins == sorted(begins), "the spans are not sorted by `begin`")
    lengths = [t.number(span["end"], "a time of a span") for span in got]
    for one, two, first, second in zip(begins, begins[1:], lengths, lengths[1:]):
        message = "Two spans begin together, and the shorter one is first: the longer one contains it, so it has to come before it."
        t.that(one < two or first >= second, message)
    t.that(names_in(got) == names_in(want), "not tested yet: the spans are not those of the events")


# -- 2 · nesting


def nested(t, two_tracks: bool) -> list[Span]:
    """Draw nested spans, some of them neighbours, three deep at least."""

    def draw() -> list[Span]:
        spans = within(t, 0, t.integer(14, 18), 2, OPERATORS)
        return ordered([*spans, *elsewhere(spans)] if two_tracks else spans)

    def tells(spans: list[Span]) -> bool:
        right = parents_of(spans)
        return (
            any(place is not None and right[place] is not None for place in right)
            and any(parents_of(spans, "neighbour")[n] != place for n, place in enumerate(right))
            and own_times(spans, "all") != own_times(spans)
            and popped_once(spans) != right
            and 0 in right
        )

    return t.draw_until(draw, tells)


def same_parents(student, t, spans: list[Span]) -> None:
    right = parents_of(spans)
    got = t.items(student.parents(spans), len(spans), "parents(...)")
    once = popped_once(spans)
    message = "Only one span is closed before the next one begins: several may have ended, so pop while the top has ended, not if."
    t.that(once == right or list(got) != once, message)
    for number, (mine, want) in enumerate(zip(got, right)):
        span = spans[number]
        if type(mine) is int and mine != want and 0 <= mine < len(spans):
            message = "Span {number} begins when span {mine} ends, and is not within it: close the spans that end at its begin, too."
            t.that(spans[mine]["end"] != span["begin"], message, number=number, mine=mine)
            message = "Span {mine} contains span {number}, but not directly: the parent is the shortest span that contains it."
            t.that(mine not in around(spans, span), message, number=number, mine=mine)
        message = "the parent of span {number} ({name}, {begin} to {end} ms, track {track}) is {mine}, expected {want}"
        values = {key: span[key] for key in ("name", "begin", "end", "track")}
        t.that(mine == want and type(mine) is type(want), message, number=number, mine=mine, want=want, **values)


@check("nesting", points=1)
def check_parents(student, t):
    "The direct parent of each span of a track"
    for _ in range(2):
        same_parents(student, t, nested(t, two_tracks=False))


READS = 20
"""A pass with a stack reads a handful of values for each span."""


@check("nesting", points=1)
def check_one_pass(student, t):
    "One pass: each span is compared with a few others"
    spans = ordered(within(t, 0, 30 * READS, 2, OPERATORS))
    found, reads = t.items(student.run(reads_of_spans, spans=spans), 2, "the result")
    got = t.items(found, len(spans), "parents(...)")
    t.that(got == parents_of(spans), "not tested yet: the parents are not right")
    message = "{reads} values of {count} spans are read, because each span is compared with many others: keep a stack of the open ones."
    t.that(t.number(reads, "the number of reads") <= READS * len(spans), message, reads=reads, count=len(spans))


@check("nesting", points=1)
def check_tracks(student, t):
    "Spans of other tracks contain nothing"
    spans = nested(t, two_tracks=True)
    got = t.items(student.parents(spans), len(spans), "parents(...)")
    t.that(any(type(place) is int for place in got), "not tested yet: no span has a parent")
    for span, place in zip(spans, got):
        if type(place) is int and 0 <= place < len(spans):
            message = "A span of track {track} has a parent on track {other}: threads run beside each other, so each has a separate stack."
            t.that(spans[place]["track"] == span["track"], message, track=span["track"], other=spans[place]["track"])
    same_parents(student, t, spans)


@check("nesting", points=2)
def check_self(student, t):
    "The self times"
    for two_tracks in (False, True):
        spans = nested(t, two_tracks)
        found = t.items(student.self_times(spans), len(spans), "self_times(...)")
        got, right = [float(t.number(value, "a self time")) for value in found], own_times(spans)
        mistakes = {
            "These are the durations: subtract the spans that are directly within.": [float(s["end"] - s["begin"]) for s in spans],
            "A span is subtracted from all spans around it: subtract it only from the one that directly contains it.": own_times(
                spans, "all"
            ),
            "Nothing is subtracted from span 0: its index is 0, and `if parent:` takes 0 for false. Ask `is not None`.": [
                float(spans[0]["end"] - spans[0]["begin"]),
                *right[1:],
            ],
        }
        wrong_if(t, got, right, mistakes)
        for number, (mine, want) in enumerate(zip(got, right)):
            name, message = spans[number]["name"], "the self time of span {number} ({name}) is {mine} ms, expected {want}"
            t.that(near(mine, want), message, number=number, name=name, mine=mine, want=want)


# -- 3 · phases


def phases_case(t, extra: bool) -> list[Span]:
    """Draw steps in which the phase `load` occurs twice; with `extra` phases outside of the steps, and on another track."""
    spans = drawn_steps(t, t.integer(2, 3), ("load", *PHASES), start=10)
    if extra:
        spans += [{"name": "load", "track": MAIN, "begin": 1, "end": 1 + t.integer(2, 6)}]
        spans += [span for span in elsewhere(spans) if span["name"] in PHASES]
    return ordered(spans)


def phases_of(student, t, spans: list[Span]) -> dict[str, float]:
    got = student.phase_times(spans, list(PHASES))
    return {name: entry(t, got, name, "phase_times(...)") for name in (*PHASES, "other")}


def same_phases(t, got: dict[str, float], spans: list[Span], mistakes: dict[str, str]) -> None:
    right = times_of(spans, PHASES)
    for name in PHASES:
        wrong = {message: times_of(spans, PHASES, mistake)[name] for message, mistake in mistakes.items()}
        wrong_if(t, got[name], right[name], wrong)
    for name in PHASES:
        message = "{name} takes {got:.2f} ms in a step, expected {want:.2f}"
        t.that(near(got[name], right[name]), message, name=name, got=got[name], want=right[name])


@check("phases", points=1)
def check_phase_times(student, t):
    "The mean of each phase in a step"
    spans = phases_case(t, extra=False)
    mistakes = {
        "These are the sums of all steps: divide by the number of steps.": "sum",
        "Only the last occurrence of a phase counts: add all of them.": "last",
        "The sum is divided by the number of occurrences: a phase may occur twice in a step, and the mean is that of the steps.": "phases",
    }
    same_phases(t, phases_of(student, t, spans), spans, mistakes)


@check("phases", points=1)
def check_outside(student, t):
    "Phases outside of the steps and on other tracks do not count"
    spans = phases_case(t, extra=True)
    got = phases_of(student, t, spans)
    before = times_of([span for span in spans if span["track"] == MAIN], PHASES, "anywhere")["load"]
    t.that(not near(got["load"], before), "A phase outside of the steps is counted: keep those that begin within a step.")
    mistakes = {
        "Phases outside of the steps and on other tracks are counted: keep those of the track of the steps that begin within a step.": "anywhere",
        "A phase on another track is counted: a thread beside the steps takes no time of theirs.": "tracks",
    }
    same_phases(t, got, spans, mistakes)


@check("phases", points=1)
def check_other(student, t):
    "The rest of a step"
    for _ in range(2):
        spans = phases_case(t, extra=False)
        got, want = phases_of(student, t, spans)["other"], times_of(spans, PHASES)["other"]
        message = "the rest of a step is {got:.2f} ms, expected {want:.2f}: the phases and the rest add up to the mean duration of a step"
        t.that(near(got, want), message, got=got, want=want)


# -- 4 · kinds

KINDS = {"aten::to": "conversion", "aten::item": "read"}


def kinds_case(t, nested_kinds: bool, extra: bool) -> list[Span]:
    """Draw steps with conversions and reads; with `nested_kinds` they call other operators and operators call them, with `extra` there are some outside of the steps."""
    plain, steps = ("aten::mul", "aten::addmm"), []

    def calls(place: int, name: str, callee: str, length: int) -> list[Span]:
        found = [{"name": name, "track": MAIN, "begin": place, "end": place + length}]
        if nested_kinds:
            found += [
                {"name": callee, "track": MAIN, "begin": place, "end": place + length - 1},
                {"name": "aten::empty_strided", "track": MAIN, "begin": place, "end": place + length - 2},
            ]
        return found

    now = 12
    for number in range(t.integer(2, 3)):
        begin, now = now, now + 1
        for name in PHASES[:2]:
            phase, now = now, now + t.integer(1, 2)
            for special, callee in (("aten::to", "aten::copy_"), ("aten::item", "aten::_local_scalar_dense")):
                length = t.integer(3, 6)
                steps += calls(now, special, callee, length)
                now += length
                length = t.integer(2, 5)
                steps.append({"name": t.choice(plain), "track": MAIN, "begin": now, "end": now + length})
                if nested_kinds:
                    steps.append({"name": special, "track": MAIN, "begin": now, "end": now + 1})
                now += length + t.integer(0, 1)
            now += 1
            steps.append({"name": name, "track": MAIN, "begin": phase, "end": now})
        now += 1
        steps.append({"name": f"ProfilerStep#{number}", "track": MAIN, "begin": begin, "end": now})
        now += 2
    if extra:
        steps += calls(1, "aten::to", "aten::copy_", t.integer(3, 6))
        steps += elsewhere([span for span in steps if span["begin"] > 12])
    return ordered(steps)


def same_kinds(student, t, spans: list[Span], mistakes: dict[str, str]) -> None:
    got = student.kind_times(spans, KINDS)
    found = [float(entry(t, got, kind, "kind_times(...)")) for kind in KIND_NAMES]
    right = list(kinds_of(spans, KINDS).values())
    wrong_if(t, found, right, {message: list(kinds_of(spans, KINDS, mistake).values()) for message, mistake in mistakes.items()})
    for kind, mine, want in zip(KIND_NAMES, found, right):
        t.that(near(mine, want), "{kind} takes {got:.2f} ms in a step, expected {want:.2f}", kind=kind, got=mine, want=want)


@check("kinds", points=1)
def check_kinds(student, t):
    "The four kinds add up to a step"
    mistakes = {
        "These are the sums of all steps: divide by the number of steps.": "sum",
        "The durations are added: the time of a span is its self time.": "durations",
    }
    same_kinds(student, t, kinds_case(t, nested_kinds=False, extra=False), mistakes)


@check("kinds", points=2)
def check_inherited(student, t):
    "What a conversion or a read calls belongs to it"
    lesson = "Each span has the kind that its name says: what is within a conversion or a read belongs to it, so ask first for the kind of its parent."
    mistakes = {
        lesson: "by name",
        "Only what a conversion or a read calls directly belongs to it: what that calls belongs to it, too.": "direct",
        "A conversion or a read that an operator calls counts as operator: only conversions and reads pass their kind on.": "operators",
    }
    same_kinds(student, t, kinds_case(t, nested_kinds=True, extra=False), mistakes)


@check("kinds", points=1)
def check_kinds_outside(student, t):
    "Only what is within the steps counts"
    lesson = "Spans outside of the steps, or on other tracks, are counted: a span counts if a step is around it."
    same_kinds(student, t, kinds_case(t, nested_kinds=False, extra=True), {lesson: "anywhere"})
