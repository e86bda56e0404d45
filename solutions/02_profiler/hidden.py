"""The hidden checks: other sizes and edge cases, and the right answers of the quiz. Never released."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import near

from .checks.correcting import counts_batch, right_counts
from .checks.limits import intervals
from .checks.reading import kinds_case
from .checks.scenarios import counted
from .checks.twins import MAIN, flops_of, kinds_of, own_times, parents_of


@check("nesting", points=1)
def check_deep(student, t):
    "Deep nesting, and spans that begin or end together"
    depth, start = t.integer(6, 9), t.integer(0, 4)
    spans = [
        {"name": f"aten::{n}", "track": MAIN, "begin": start, "end": start + 2 * depth - n}
        for n in range(depth)
    ]
    spans.append({"name": "aten::next", "track": MAIN, "begin": spans[-1]["end"], "end": spans[-2]["end"]})
    t.that(
        t.items(student.parents(spans), len(spans), "parents(...)") == parents_of(spans),
        "a parent is wrong if spans begin or end together",
    )
    got = [
        float(t.number(value, "a self time"))
        for value in t.items(student.self_times(spans), len(spans), "self_times(...)")
    ]
    t.that(near(got, own_times(spans)), "a self time is wrong if spans begin or end together")


@check("kinds", points=1)
def check_all_kinds(student, t):
    "Nested kinds, other tracks and spans outside of the steps together"
    case = kinds_case(t, nested_kinds=True, extra=True)
    got, want = student.kind_times(*case), kinds_of(*case)
    t.that(type(got) is dict and set(got) == set(want), "kind_times(...) should return the four kinds")
    for kind, value in want.items():
        t.that(
            near(t.number(got[kind], "a time"), value),
            "the time of a kind is wrong in a trace with everything",
        )


@check("accuracy", points=1)
def check_single(student, t):
    "Batches of one image"
    signs = (1, -1, 1, -1, -1)
    batches = [(sign * logits, labels) for sign in signs for logits, labels in [counts_batch(t, 1, 4)]]
    got = student.run(counted, classes=4, batches=batches)
    t.that(near(got, right_counts(batches, 4)), "the counts are wrong for batches of one image")


@check("overlap", points=1)
def check_overlap_edges(student, t):
    "No intervals, and equal ones"
    case = intervals(t, 4)
    alone = t.number(student.covered(case), "covered(...)")
    t.that(
        near(t.number(student.overlap(case, case), "overlap(...)"), alone) and alone > 0,
        "the overlap of intervals with themselves is wrong",
    )
    t.that(
        near(t.number(student.overlap(case, []), "overlap(...)"), 0.0),
        "the overlap with no intervals is wrong",
    )
    t.that(near(t.number(student.covered([]), "covered(...)"), 0.0), "the length of no intervals is wrong")


@check("flops", points=1)
def check_single_layer(student, t):
    "A single layer"
    sizes, batch = [t.integer(3, 40), t.integer(3, 40)], t.integer(2, 50)
    t.that(
        t.number(student.step_flops(sizes, batch), "step_flops(...)") == flops_of(sizes, batch),
        "the FLOPs of a single layer are wrong",
    )


ANSWERS = {
    "q1": Answer(
        "b",
        "the profiler costs a few microseconds for each operator, so thousands of small ones look slower "
        "than they are",
    ),
    "q2": Answer("d", "removed, it leaves 70 %: 1 / 0.7 = 1.43, whatever makes loading faster"),
    "q3": Answer(
        "a", "the value is ready only after all work before it; the copy itself takes some microseconds"
    ),
    "q4": Answer("c", "the union is between 8 ms, one within the other, and 10 ms, the whole step"),
    "q5": Answer("b", "it moves two numbers for one FLOP, so memory limits it; fusion saves the moves"),
}
