"""The hidden check: other patterns and sizes; the answers of the quiz. Never released.

Every requirement of the text has a visible check. The messages contain no tensor values that a student could
copy.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.exchange import routed, shift

# -- 2 · exchange


@check("exchange", points=1, seconds=40)
def check_other_patterns(student, t):
    "Other patterns, with tensors of unequal sizes"
    for to in ([1, 0, 3, 2], shift(t.integer(5, 6), 3)):
        values = [t.normal(t.integer(2, 9)) for _ in to]
        for rank, got in enumerate(routed(student, values, to).results):
            t.close(
                got,
                values[to.index(rank)],
                "the tensor that rank {rank} of {world} received",
                rank=rank,
                world=len(to),
            )


# -- quiz

ANSWERS = {
    "q1": Answer(
        "b",
        "2 (N-1)/N is 1.75 for 8 ranks and 1.97 for 64: for a large tensor the number of ranks hardly "
        "matters",
    ),
    "q2": Answer(
        "c", "12 rounds instead of 126: the time of a small tensor depends on the messages, not on the bytes"
    ),
    "q3": Answer(
        "a",
        "dist.send guarantees only that you may reuse the tensor; whether it waits for the receiver depends "
        "on the size",
    ),
    "q4": Answer(
        "d", "chunk c is summed from rank c + 1 round the ring to rank c; the all-gather copies the bits"
    ),
    "q5": Answer("a", "B f bytes instead of 2 B f, with f = (N-1)/N"),
}
