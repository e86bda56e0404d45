"""The hidden checks: other sizes and numbers of ranks, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.blocks import ascending, right_rectangle
from .checks.ranks import backward_run, ulysses_run, zigzag_table


@check("visible", points=1)
def check_visible_other_sizes(student, t):
    "Other positions"
    # 0: the last query sees the first key, and no other
    for back in (0, *(t.integer(0, 20) for _ in range(7))):
        queries, keys = ascending(t, t.integer(1 if back else 2, 9), 5) + 20, ascending(t, t.integer(1, 9), 5)
        right_rectangle(student, t, queries, keys - keys[0] + int(queries[-1]) - back)


@check("backward", points=1, seconds=40)
def check_backward_four_ranks(student, t):
    "Four ranks"
    backward_run(student, t, zigzag_table(16, 4))


@check("ulysses", points=1, seconds=30)
def check_ulysses_three_ranks(student, t):
    "Three ranks"
    ulysses_run(student, t, 3, 6)


# -- quiz

ANSWERS = {
    "q1": Answer("b", "out · exp(lse) is the numerator of a block, and exp(lse) its denominator"),
    "q2": Answer("d", "the other ranks wait in their shift for its message"),
    "q3": Answer("c", "in each step all ranks wait for the busiest one, which computes a full block"),
    "q4": Answer(
        "a", "each rank that used the block adds its contribution, and only the ring visits them all"
    ),
    "q5": Answer("c", "the target of the last token of a part is the first token of another part"),
    "q6": Answer("b", "each head is computed by one rank, for the whole sequence"),
}
