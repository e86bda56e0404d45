"""The hidden checks: other cases, and the answers of the quiz. Never released.

Their messages do not contain the expected values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.planning import chosen, cost, timed_blocks
from .checks.runs import same_training, same_weights_gathered, training_case
from .checks.twins import by_the_clock, followed, least_time


@check("policy", points=1)
def check_few_units(student, t):
    "One unit, and two units"
    for units in ([t.integer(1, 10**6)], [t.integer(1, 10**6), t.integer(1, 10**6)]):
        for keep in (8, 1):
            got, want = cost(student, t, units, 8, keep), followed(units, 8, keep)
            good = all(abs(mine - right) <= 1e-6 * right + 1e-6 for mine, right in zip(got, want))
            t.that(
                bool(good),
                "With one or two units, the peak or the bytes are wrong: the last unit is never gathered "
                "again.",
            )


@check("wrapping", points=1, seconds=20)
def check_slow_start(student, t):
    "A long start of each message, and memory for everything"
    for number in (1, t.integer(2, 6)):
        blocks, alpha, beta = timed_blocks(t, number, 0.5)
        alpha, limit = 100 * alpha, sum(size for size, _ in blocks)
        got = by_the_clock(chosen(student, t, blocks, limit, alpha, beta), alpha, beta)
        good = got <= least_time(blocks, limit, alpha, beta) * (1 + 1e-6)
        t.that(
            bool(good),
            "If the start of a message takes long and everything fits, there are faster units than yours.",
        )


@check("gather", points=1, seconds=30)
def check_three_ranks(student, t):
    "Three ranks, whose shards have different sizes"
    same_weights_gathered(student, t, (3,))


@check("prefetch", points=1, seconds=40)
def check_other_sizes(student, t):
    "One block, and three ranks"
    for world, blocks in ((2, 1), (3, 3)):
        same_training(student, t, training_case(t, world, blocks, True))


# -- quiz

ANSWERS = {
    "q1": Answer("b", "each message overlaps with a longer forward; the rank waits only for the first one"),
    "q2": Answer("d", "gradients and state stay sharded; a unit is whole from its forward to its backward"),
    "q3": Answer("a", "the second forward runs while the unit is whole for its backward"),
    "q4": Answer(
        "c", "just before backward all 20 units are whole, 2000 MB; with resharding two are, 200 MB"
    ),
    "q5": Answer(
        "b",
        "8 ms for the first gather, then 19 times the longer one of gather and forward, then 5 ms: 8 + 19 * "
        "8 + 5",
    ),
}
