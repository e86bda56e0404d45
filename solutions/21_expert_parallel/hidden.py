"""The hidden checks: other sizes and numbers of ranks, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.parallel import layer_case, rows_case
from .checks.routing import capacity_case, route_case


@check("route", points=1)
def check_route_all(student, t):
    "All experts chosen, and one of many"
    route_case(student, t, 4, size=4)
    route_case(student, t, 1, size=16)


@check("capacity", points=1, seconds=20)
def check_large_capacity(student, t):
    "A capacity that no expert exceeds"
    capacity_case(student, t, [t.integer(40, 60)], tokens=t.integer(7, 11), size=5)


@check("exchange", points=1, seconds=30)
def check_exchange_three_ranks(student, t):
    "Three ranks, some of which send nothing to each other"
    rows_case(student, t, 3)


@check("layer", points=1, seconds=40)
def check_layer_three_ranks(student, t):
    "Three ranks, one expert each"
    layer_case(student, t, 3, size=3)


# -- quiz

ANSWERS = {
    "q1": Answer(
        "b", "a weight that is always 1 has no gradient, so the router never learns which expert is better"
    ),
    "q2": Answer("d", "f is a count, and a small change of the router changes no count"),
    "q3": Answer(
        "a", "the gradient of an expert is already the sum over the tokens of all ranks of its group"
    ),
    "q4": Answer("c", "4 k T h (t - 1) / t numbers: the rows travel, and the experts stay"),
    "q5": Answer("b", "all others wait for it in the all-to-all that returns the results"),
}
