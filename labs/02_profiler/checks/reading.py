"""The visible checks of the functions that read a trace: on drawn traces whose times are whole ms."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, near, same, wrong_if

from . import scenarios, twins
from .twins import KIND_NAMES, MAIN, Span

FINE = {"rtol": 1e-6, "atol": 1e-8}
PHASES = ("load", "forward", "backward", "optimizer", "validate", "save")
"""Names of phases; a case draws some of them."""

# -- 1 · spans


def spans_of(student, t) -> tuple[list[Any], list[Span]]:
    """What the student reads in a shuffled trace, and the drawn spans."""
    steps = twins.drawn_steps(t, 2, t.shuffled(PHASES)[:2], start=t.integer(2, 5))
    want = twins.ordered([*steps, *twins.elsewhere(steps)])
    first = t.integer(10**6, 10**9)
    got = student.read_spans(twins.trace_of(t.shuffled(want), first))
    t.that(type(got) is list, "read_spans(...) should return a list of dicts")
    for span in got:
        message = "each span should be a dict with name, track, begin and end"
        t.that(type(span) is dict and {"name", "track", "begin", "end"} <= set(span), message)
    return got, want


def names_in(spans: list[Any]) -> list[tuple[str, str]]:
    return sorted((str(span["name"]), str(span["track"])) for span in spans)


@check("spans", points=1)
def check_complete(student, t):
    "The complete events, and only these"
    got, want = spans_of(student, t)
    message = 'The event of the profiler itself is in the list: leave out the category "Trace".'
    t.that(all(span["name"] != "PyTorch Profiler (0)" for span in got), message)
    message = (
        "A region is there a second time, on the track of a GPU: leave out the category gpu_user_annotation."
    )
    t.that(all(span["track"] != 7 for span in got), message)
    message = "read_spans(...) has {got} spans, not {want}: one for each event of the kind X that is work"
    t.that(len(got) == len(want), message, got=len(got), want=len(want))
    t.that(names_in(got) == names_in(want), "the names or tracks of the spans are not those of the events")


def times_in(t, spans: list[Any]) -> list[float]:
    numbers = [[t.number(span[key], "a time of a span") for key in ("begin", "end")] for span in spans]
    return [value for pair in sorted(numbers) for value in pair]


MANY = "not tested yet: there are too many or too few spans"


@check("spans", points=1)
def check_milliseconds(student, t):
    "Times in ms; the earliest span begins at 0"
    got, want = spans_of(student, t)
    t.that(len(got) == len(want), MANY)
    first = want[0]["begin"]
    moved = [span | {"begin": span["begin"] - first, "end": span["end"] - first} for span in want]
    found, right = times_in(t, got), times_in(t, moved)
    lengths = times_in(t, [span | {"end": span["end"] - span["begin"]} for span in moved])
    later, copied = ([value + first + more for value in right] for more in (2.5, 1.0))
    mistakes = {
        "The times are microseconds, as in the file: divide by 1000.": [1000 * value for value in right],
        "The times are seconds: a ms is 1000 microseconds.": [value / 1000 for value in right],
        "The times begin at the event of the profiler, which is no span.": later,
        "The times begin at an event that is no span, the copy of a region on the track of a GPU.": copied,
        "`end` is the duration: add it to `begin`.": lengths,
    }
    wrong_if(t, found, right, mistakes, atol=1e-4)
    begin = min(found[::2])
    t.that(abs(begin) < 1e-4, "the earliest span begins at {got:.3f} ms, not at 0", got=begin)
    t.that(near(found, right, atol=1e-4), "the times of the spans are not those of the events in ms")


@check("spans", points=1)
def check_order(student, t):
    "Sorted by begin; of spans that begin together, the longer one first"
    got, want = spans_of(student, t)
    t.that(len(got) == len(want), MANY)
    begins, ends = ([t.number(span[key], "a time of a span") for span in got] for key in ("begin", "end"))
    t.that(begins == sorted(begins), "the spans are not sorted by `begin`")
    message = (
        "Two spans begin together, and the shorter one is first: the longer one contains it, so it has to "
        "come before it."
    )
    for (begin, end), (next_begin, next_end) in itertools.pairwise(zip(begins, ends)):
        t.that(begin < next_begin or end >= next_end, message)
    t.that(names_in(got) == names_in(want), "not tested yet: the spans are not those of the events")


# -- 2 · nesting


def nested(t, two_tracks: bool) -> list[Span]:
    """Draw nested spans, some of them neighbours, three deep at least."""

    def draw() -> list[Span]:
        spans = twins.within(t, 0, t.integer(14, 18), 2, twins.OPERATORS)
        return twins.ordered([*spans, *twins.elsewhere(spans)] if two_tracks else spans)

    def tells(spans: list[Span]) -> bool:
        right = twins.parents_of(spans)
        return (
            any(place is not None and right[place] is not None for place in right)
            and twins.neighbours(spans)
            and twins.own_times(spans, "all") != twins.own_times(spans)
            and twins.popped_once(spans) != right
            and 0 in right
        )

    return t.draw_until(draw, tells)


def same_parents(student, t, spans: list[Span]) -> None:
    """``parents`` finds the parent of each span."""
    right, once = twins.parents_of(spans), twins.popped_once(spans)
    got = t.items(student.parents(spans), len(spans), "parents(...)")
    message = (
        "Only one span is closed before the next one begins: several may have ended, so pop while the top "
        "has ended, not if."
    )
    t.that(once == right or list(got) != once, message)
    for number, (span, mine, want) in enumerate(zip(spans, got, right)):
        values = {"number": number, "mine": mine}
        if type(mine) is int and mine != want and 0 <= mine < len(spans):
            message = (
                "Span {number} begins when span {mine} ends, and is not within it: close the spans that end "
                "at its begin, too."
            )
            t.that(spans[mine]["end"] != span["begin"], message, **values)
            message = (
                "Span {mine} contains span {number}, but not directly: the parent is the shortest span that "
                "contains it."
            )
            t.that(mine not in twins.around(spans, span), message, **values)
        message = (
            "the parent of span {number} ({name}, {begin} to {end} ms, track {track}) is {mine}, not {want}"
        )
        t.that(mine == want and type(mine) is type(want), message, **values, want=want, **span)


@check("nesting", points=1)
def check_parents(student, t):
    "The direct parent of each span of a track"
    for _ in range(2):
        same_parents(student, t, nested(t, two_tracks=False))


SPANS, DEPTH = 30_000, 3
"""A loop over all pairs does not end in the seconds of the check; one pass takes 0.1 s."""


def many_spans(t) -> tuple[Tensor, Tensor, list[int | None]]:
    """Draw spans in groups, in which each directly contains the next; return begins, ends and parents."""
    groups = SPANS // DEPTH
    lengths, depths = 2 * DEPTH + t.integers(0, 3, groups), t.integers(1, DEPTH, groups).tolist()
    first = (lengths.cumsum(0) - lengths).tolist()
    begins, ends, right = [], [], []
    for begin, length, depth in zip(first, lengths.tolist(), depths):
        for inner in range(depth):
            right.append(len(right) - 1 if inner else None)
            begins.append(float(begin + inner))
            ends.append(float(begin + length - inner))
    return torch.tensor(begins), torch.tensor(ends), right


@check("nesting", points=1, seconds=2)
def check_one_pass(student, t):
    "One pass: 20,000 spans are read within 2 seconds"
    begins, ends, right = many_spans(t)
    got = t.items(
        student.run(scenarios.parents_of_many, begins=begins, ends=ends), len(right), "parents(...)"
    )
    t.that(got == right, "not tested yet: the parents are not right")


@check("nesting", points=1)
def check_tracks(student, t):
    "Spans of other tracks contain nothing"
    spans = nested(t, two_tracks=True)
    got = t.items(student.parents(spans), len(spans), "parents(...)")
    t.that(any(type(place) is int for place in got), "not tested yet: no span has a parent")
    message = (
        "A span of track {track} has a parent on track {other}: threads run beside each other, so each has "
        "a separate stack."
    )
    for span, place in zip(spans, got):
        if type(place) is int and 0 <= place < len(spans):
            track, other = span["track"], spans[place]["track"]
            t.that(track == other, message, track=track, other=other)
    same_parents(student, t, spans)


@check("nesting", points=2)
def check_self(student, t):
    "The self times"
    for two_tracks in (False, True):
        spans = nested(t, two_tracks)
        found = t.items(student.self_times(spans), len(spans), "self_times(...)")
        got, right = [float(t.number(value, "a self time")) for value in found], twins.own_times(spans)
        durations = [float(span["end"] - span["begin"]) for span in spans]
        mistakes = {
            "These are the durations: subtract the spans that are directly within.": durations,
            "A span is subtracted from all spans around it: subtract it only from the one that directly "
            "contains it.": twins.own_times(spans, "all"),
            "Nothing is subtracted from span 0: its index is 0, and `if parent:` takes 0 for false. Ask `is "
            "not None`.": [durations[0], *right[1:]],
        }
        wrong_if(t, got, right, mistakes)
        same(t, got, right, "the self time of span {i} in ms", **FINE)


# -- 3 · phases


def phases_case(t, extra: bool) -> tuple[list[Span], list[str]]:
    """Draw three phases, and steps in which the first occurs twice; with `extra` there are phases before,
    between and after the steps, and on another track."""
    phases = t.shuffled(PHASES)[:3]
    spans = twins.drawn_steps(t, t.integer(2, 3), [phases[0], *phases], start=10)
    if extra:
        after = [span_of(t.choice(phases), step["end"], 1) for step in twins.steps_of(spans)]
        spans += [span_of(phases[0], 1, t.integer(2, 6)), *after]
        spans += [span for span in twins.elsewhere(spans) if span["name"] in phases]
    return twins.ordered(spans), phases


def phases_of(student, t, spans: list[Span], phases: list[str]) -> dict[str, float]:
    got = student.phase_times(spans, phases)
    return {name: entry(t, got, name, "phase_times(...)") for name in (*phases, "other")}


def span_of(name: str, begin: int, length: int) -> Span:
    """A span of the main track."""
    return {"name": name, "track": MAIN, "begin": begin, "end": begin + length}


def same_phases(
    t, got: dict[str, float], spans: list[Span], phases: list[str], mistakes: dict[str, str]
) -> None:
    """The mean times of the phases are right."""
    right, *wrong = (twins.times_of(spans, phases, each) for each in ("", *mistakes.values()))
    want = {name: right[name] for name in phases}
    same(t, got, want, "the time of {name} in a step in ms", dict(zip(mistakes, wrong)), **FINE)


@check("phases", points=1)
def check_phase_times(student, t):
    "The mean of each phase in a step"
    spans, phases = phases_case(t, extra=False)
    mistakes = {
        "These are the sums of all steps: divide by the number of steps.": "sum",
        "Only the last occurrence of a phase counts: add all of them.": "last",
        "The sum is divided by the number of occurrences: a phase may occur twice in a step, and the mean "
        "is that of the steps.": "phases",
    }
    same_phases(t, phases_of(student, t, spans, phases), spans, phases, mistakes)


@check("phases", points=1)
def check_outside(student, t):
    "Phases outside of the steps and on other tracks do not count"
    spans, phases = phases_case(t, extra=True)
    got = phases_of(student, t, spans, phases)
    of_main = [span for span in spans if span["track"] == MAIN]
    lessons = {
        "between": "A phase between two steps is counted: keep those that begin within a step.",
        "anywhere": "A phase outside of the steps is counted: keep those that begin within a step.",
    }
    for name in phases:
        right = twins.times_of(of_main, phases)[name]
        for mistake, message in lessons.items():
            wrong = twins.times_of(of_main, phases, mistake)[name]
            t.that(near(right, wrong) or not near(got[name], wrong), message)
    mistakes = {
        "Phases outside of the steps and on other tracks are counted: keep those of the track of the steps "
        "that begin within a step.": "anywhere",
        "A phase on another track is counted: a thread beside the steps takes no time of theirs.": "tracks",
    }
    same_phases(t, got, spans, phases, mistakes)


@check("phases", points=1)
def check_other(student, t):
    "The rest of a step"
    message = (
        "the rest of a step is {got:.2f} ms, expected {want:.2f}: the phases and the rest add up to the "
        "mean duration of a step"
    )
    for _ in range(2):
        spans, phases = phases_case(t, extra=False)
        got = phases_of(student, t, spans, phases)["other"]
        want = twins.times_of(spans, phases)["other"]
        t.that(near(got, want), message, got=got, want=want)


# -- 4 · kinds

CONVERSIONS, READS = ("aten::to", "aten::contiguous"), ("aten::item", "cudaStreamSynchronize")
CALLS = {"conversion": "aten::copy_", "read": "aten::_local_scalar_dense"}
"""A conversion and a read → what each calls."""


def called(name: str, kind: str, begin: int, length: int, nested_kinds: bool) -> list[Span]:
    """A conversion or a read; with `nested_kinds` it calls other operators."""
    names = (name, CALLS[kind], "aten::empty_strided") if nested_kinds else (name,)
    return [span_of(each, begin, length - depth) for depth, each in enumerate(names)]


def kinds_case(t, nested_kinds: bool, extra: bool) -> tuple[list[Span], dict[str, str]]:
    """Draw kinds, and steps with conversions and reads; with `nested_kinds` they call other operators and
    operators call them, with `extra` there are some before, between and after the steps."""
    steps, now = [], 12
    kinds = {t.choice(CONVERSIONS): "conversion", t.choice(READS): "read"}
    for number in range(t.integer(2, 3)):
        begin, now = now, now + 1
        for name in t.shuffled(PHASES)[:2]:
            phase, now = now, now + t.integer(1, 2)
            for special, kind in kinds.items():
                length = t.integer(3, 6)
                steps += called(special, kind, now, length, nested_kinds)
                now += length
                length = t.integer(2, 5)
                steps.append(span_of(t.choice(("aten::mul", "aten::addmm")), now, length))
                if nested_kinds:
                    steps.append(span_of(special, now, 1))
                now += length + t.integer(0, 1)
            now += 1
            steps.append(span_of(name, phase, now - phase))
        now += 1
        steps.append(span_of(f"ProfilerStep#{number}", begin, now - begin))
        if extra:
            steps.append(span_of(t.choice(tuple(kinds)), now, 1))
        now += 2
    if extra:
        steps += called(next(iter(kinds)), "conversion", 1, t.integer(3, 6), nested_kinds)
        steps += twins.elsewhere([span for span in steps if span["begin"] > 12])
    return twins.ordered(steps), kinds


def same_kinds(student, t, case: tuple[list[Span], dict[str, str]], mistakes: dict[str, str]) -> None:
    """The mean times of the four kinds are right."""
    right, *wrong = (twins.kinds_of(*case, each) for each in ("", *mistakes.values()))
    what = "the time of {name} in a step in ms"
    same(t, student.kind_times(*case), right, what, dict(zip(mistakes, wrong)), **FINE)


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
    mistakes = {
        "Each span has the kind that its name says: what is within a conversion or a read belongs to it, so "
        "ask first for the kind of its parent.": "by name",
        "Only what a conversion or a read calls directly belongs to it: what that calls belongs to it, "
        "too.": "direct",
        "A conversion or a read that an operator calls counts as operator: only conversions and reads pass "
        "their kind on.": "operators",
    }
    same_kinds(student, t, kinds_case(t, nested_kinds=True, extra=False), mistakes)


@check("kinds", points=1)
def check_kinds_outside(student, t):
    "Only what is within the steps counts"
    lesson = (
        "Spans outside of the steps or on other tracks are counted: a span counts if a step is around it."
    )
    same_kinds(student, t, kinds_case(t, nested_kinds=False, extra=True), {lesson: "anywhere"})
