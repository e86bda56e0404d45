"""The hidden checks: configurations of other kinds, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.errors import UserError
from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import Answer, quiz_right
from dlo_lib.grading.schedules import SLACK, most_held, mostly_there
from dlo_lib.grading.twins import twin
from dlo_lib.parallel.pipeline.simulate import Costs, simulate

from .checks import batch_of, is_cut, own_table, parts, split_run
from .drawn import table_cases
from .quiz import QUIZ
from .twins import IGNORED, near, slowest, summed

# -- 1 · partition


@twin
def least_by_bisection(costs: list[float], stages: int) -> float:
    """Another way than dynamic programming: the least limit within which stages can be filled one after the other."""
    low, high = max(costs), sum(costs)
    for _ in range(60):
        limit = (low + high) / 2
        used, held = 1, 0.0
        for cost in costs:
            used, held = (used, held + cost) if held + cost <= limit else (used + 1, cost)
        low, high = (low, limit) if used <= stages else (limit, high)
    return high


@check("partition", points=2, seconds=5)
def check_measured_costs(student, t):
    "Costs in seconds, and more pieces than can be tried"
    costs = [t.uniform(0.001, 0.009) for _ in range(t.integer(40, 60))]
    stages = t.integer(5, 8)
    starts = is_cut(student, t, costs, stages)
    t.that(
        bool(slowest(costs, starts) <= least_by_bisection(costs, stages) * (1 + 1e-6)),
        "Measured costs are fractions of a second: the slowest stage of a better cut is faster.",
    )


# -- 2 · the loss of a micro-batch


@check("loss", points=1)
def check_padding(student, t):
    "Targets of -100 are not counted"
    outputs, targets = batch_of(t, [t.integer(6, 9)])
    targets[0][: t.integer(2, 4)] = IGNORED
    got = sum(parts(student, t, outputs, targets))
    want = summed(outputs[0], targets[0]) / int((targets[0] != IGNORED).sum())
    t.that(bool(abs(got - want) < 1e-6), "Divide by the number of targets that are not -100, not by all.")


@check("loss", points=1)
def check_nothing_to_learn(student, t):
    "A micro-batch without any valid target adds nothing"
    outputs, targets = batch_of(t, [3, 3])
    targets[1] = torch.full_like(targets[1], IGNORED)
    got = parts(student, t, outputs, targets)
    t.that(bool(got[1] == 0.0), "A micro-batch of padding alone has the part 0; a mean over nothing is NaN.")


# -- 4 · a table of one's own


@check("table", points=1)
def check_in_flight(student, t):
    "No rank holds more micro-batches than there are ranks from it to the end"
    for ranks, micro_batches in table_cases(t):
        schedule, call = own_table(student, t, ranks, micro_batches)
        mostly_there(t, schedule, call, "FB")
        good = all(held <= min(micro_batches, ranks - rank) for rank, held in enumerate(most_held(schedule)))
        t.that(good, "A rank begins too many micro-batches before its first backward.")


@check("table", points=1)
def check_no_more_bubble(student, t):
    "The bubble is no longer than that of 1F1B"
    for ranks, micro_batches in table_cases(t):
        forward, half = t.uniform(0.5, 1.0), t.uniform(0.5, 1.0)
        schedule, call = own_table(student, t, ranks, micro_batches)
        mostly_there(t, schedule, call, "FB")
        try:
            run = simulate(schedule, Costs(forward, half, half))
        except UserError:
            continue  # it cannot be carried out: another check says so
        best = (micro_batches + ranks - 1) * (forward + 2 * half)
        message = "The table takes longer than (m + p - 1)(F + B): some rank begins with too few forwards."
        t.that(bool(run.makespan <= best * (1 + SLACK)), message)


# -- 7 · the split backward


@check("split", points=1, seconds=20)
def check_weight_parts_add_up(student, t):
    "The weight parts of several micro-batches add up"
    result, (_, weight, _) = split_run(student, t, 3)
    t.that(near([result["weight"]], [weight]), "With several micro-batches the weight gradients are not added up.")


# -- quiz

right = quiz_right(
    QUIZ,
    {
        "q1": Answer("c", "the slowest stage sets the pace of all."),
        "q2": Answer("c", "gradients add up over micro-batches, so each part must be divided by what the whole batch has."),
        "q3": Answer("a", "a buffer hides the mistake as long as messages are small."),
        "q4": Answer("b", "only the input part is on the path from rank to rank."),
        "q5": Answer("c", "rank 0 begins with p - 1 forwards more than backwards."),
        "q6": Answer("d", "2BW updates once for several micro-batches, and two versions are enough."),
    },
    points=1,
)
