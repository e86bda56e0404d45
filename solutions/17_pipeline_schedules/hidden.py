"""The hidden checks: few micro-batches, and the answers of the quiz. Never released.

Their messages do not contain the expected values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.grading.checks.schedules import carried_out

from .checks.schedules import made_mostly
from .checks.twins import shared, three

# -- 6 · ZB-H1


@check("zb_h1", points=1)
def check_few_weight_parts(student, t):
    "Fewer micro-batches than ranks"
    for ranks in (t.integer(4, 6), t.integer(4, 6)):
        schedule, call = made_mostly(student, t, "zb_h1_rows", ranks, t.integer(1, ranks - 2))
        carried_out(t, schedule, shared(*three(t)), call)


# -- quiz

ANSWERS = {
    "q1": Answer("a", "the bubble is (p - 1) / m of the ideal time, whatever a micro-batch costs"),
    "q2": Answer("c", "the bubble is the same; rank r holds p - r micro-batches, not m"),
    "q3": Answer(
        "b",
        "every micro-batch crosses v p - 1 boundaries between ranks, not p - 1, and the warm-up is longer",
    ),
    "q4": Answer("d", "each input part needs the input part of the next stage, and no weight part"),
    "q5": Answer(
        "a", "rank r holds p - r: on the first rank the gradient of a micro-batch takes longest to arrive"
    ),
}
