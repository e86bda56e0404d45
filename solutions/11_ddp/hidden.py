"""The hidden checks: other cases, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.replicas import bucket_case


@check("buckets", points=1)
def check_only_large(student, t):
    "Every gradient is larger than the limit"
    count, limit = t.integer(3, 5), 4 * t.integer(10, 20)
    got = bucket_case(t, student, [limit + 4 * t.integer(1, 9) for _ in range(count)], limit)
    t.that(
        [len(bucket) for bucket in got] == [1] * count,
        "Gradients that are all larger than the limit need one bucket each, and no other bucket.",
    )


# -- quiz

ANSWERS = {
    "q1": Answer(
        "b", "only gradients are sent after the start; equal steps from equal weights give equal weights"
    ),
    "q2": Answer("d", "a ring all-reduce sends 2 (N - 1) / N times the bytes: 2 x 7 / 8 x 1 GB"),
    "q3": Answer(
        "a", "the n-th all-reduce of a rank is added to the n-th of the others, regardless of its content"
    ),
    "q4": Answer(
        "c", "the global batch grows with the number of ranks; DDP does not change the learning rate"
    ),
    "q5": Answer("b", "a collective waits for all ranks, and the others have left the loop"),
}
