"""The hidden checks: sizes and costs of other kinds, the targets of the contest, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import Answer, quiz_right
from dlo_lib.grading.schedules import SLACK, carried_out, complete
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import Action, B, F, Schedule, W, in_a_loop

from .checks import entered, made, made_mostly, same_held, same_waiting
from .quiz import QUIZ
from .twins import contest_case, groups, known, shared, size, three

# -- 2 · AFAB


@check("afab", points=1)
def check_forwards_first(student, t):
    "All forwards come before the first backward"
    for ranks, micro_batches in (size(t), size(t)):
        schedule, _ = made_mostly(student, t, "afab_rows", ranks, micro_batches)
        for row in schedule.rows:
            kinds = [action.kind for action in row]
            first = kinds.index(B) if B in kinds else len(kinds)
            t.that(F not in kinds[first:], "AFAB means that a rank goes back only when all its forwards are done.")


# -- 3 · 1F1B


@check("one_f_one_b", points=1)
def check_few_micro_batches(student, t):
    "Fewer micro-batches than ranks"
    for ranks in (t.integer(4, 6), t.integer(4, 6)):
        micro_batches = t.integer(1, ranks - 2)
        schedule, call = made(student, t, "one_f_one_b_rows", ranks, micro_batches)  # every cell exists
        forwards = {action for row in schedule.rows for action in row if action.kind is F}
        wanted = {Action(F, stage, each) for stage in range(ranks) for each in range(micro_batches)}
        t.that(forwards == wanted, "With fewer micro-batches than ranks the warm-up takes all there are, and no more.")
        carried_out(t, schedule, shared(*three(t)), call)


# -- 4 · interleaved


@check("interleaved", points=1)
def check_more_stages(student, t):
    "Three and four stages a rank"
    for per_rank in (3, 4):
        ranks, micro_batches = groups(t)
        schedule, call = made(student, t, "interleaved_rows", ranks, micro_batches, per_rank)
        complete(t, schedule, call, "FB")


# -- 5 · memory


@check("memory", points=1)
def check_held_few(student, t):
    "Few micro-batches: no more is held than there are"
    ranks = t.integer(4, 6)
    lesson = "With few micro-batches a rank holds all of them, and no more."
    for name in ("1F1B", "ZB-H1"):
        same_held(student, t, name, ranks, t.integer(1, 2), 1, lesson)


# -- 6 · ZB-H1


@check("zb_h1", points=1)
def check_few_open(student, t):
    "Few weight parts stay open"
    ranks = t.integer(3, 5)
    schedule, _ = made_mostly(student, t, "zb_h1_rows", ranks, 4 * ranks)
    for rank, row in enumerate(schedule.rows):
        inputs, weights, most = 0, 0, 0
        for action in row:
            inputs += action.kind not in (F, W)
            weights += action.kind is W
            most = max(most, inputs - weights)
        # r, and the one whose input part has just been done
        t.that(most <= rank + 1, "Rank r needs only r open weight parts for its drain; each one open holds memory.")


# -- 7 · bubble


@check("bubble", points=1)
def check_waiting_unequal(student, t):
    "ZB-H1, when the three parts cost differently"
    for _ in range(3):
        lesson = "What is left of a forward and an input part when a weight part has filled it?"
        same_waiting(student, t, "ZB-H1", (*size(t), 1), three(t), lesson)


# -- 9 · contest: what the library's tables reach, or a little more


def reached(t, run: Simulation, target: float, message: str) -> None:
    t.that(bool(run.bubble_ratio <= target + SLACK), message)


@check("contest", points=2)
def check_split_backward(student, t):
    "With a cap of p: at least as good as ZB-H1"
    for ranks in (3, t.integer(4, 6)):
        case = contest_case(t, ranks, 2 * ranks + t.integer(0, 8), ranks)
        best = simulate(known("ZB-H1", ranks, case["micro_batches"]), Costs(**case["costs"]))
        reached(t, entered(student, t, case), best.bubble_ratio, "ZB-H1 fits a cap of p: split the backward and put weight parts off.")


@check("contest", points=2)
def check_tight_cap(student, t):
    "With a cap below p: half the bubble of 1F1B with a shorter warm-up"
    for ranks in (4, t.integer(5, 7)):
        cap = ranks - 1
        case = contest_case(t, ranks, 3 * ranks + t.integer(0, 5), cap)
        plain = simulate(short_1f1b(ranks, case["micro_batches"], cap), Costs(**case["costs"]))
        message = "A tight cap blocks forwards, not weight parts: a rank that may not begin a forward does a weight part, which also frees memory."
        reached(t, entered(student, t, case), plain.bubble_ratio / 2, message)


@check("contest", points=2)
def check_spare_memory(student, t):
    "With a cap of 2p: a quarter less bubble than ZB-H2"
    for ranks in (3, t.integer(4, 6)):
        case = contest_case(t, ranks, 3 * ranks + t.integer(0, 5), 2 * ranks)
        best = simulate(known("ZB-H2", ranks, case["micro_batches"]), Costs(**case["costs"]))
        message = "One stage a rank cannot fill the pipeline faster. Two half stages a rank can: lay them out in a V, or in a loop."
        reached(t, entered(student, t, case), 0.75 * best.bubble_ratio, message)


def short_1f1b(ranks: int, micro_batches: int, cap: int) -> Schedule:
    """1F1B whose warm-up is cut so that no rank holds more than ``cap`` micro-batches."""
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, cap - 1)
        later = [(Action(F, rank, done + ahead), Action(B, rank, done)) for done in range(micro_batches)]
        row = [Action(F, rank, each) for each in range(ahead)] + [action for pair in later for action in pair]
        rows.append(tuple(action for action in row if action.micro_batch < micro_batches))
    return Schedule("1F1B", in_a_loop(ranks), micro_batches, tuple(rows))


# -- quiz

ANSWERS = {
    "q1": Answer("a", "the bubble is (p - 1) / m of the ideal time, whatever a micro-batch costs"),
    "q2": Answer("c", "the bubble is the same; rank r holds p - r micro-batches, not m"),
    "q3": Answer("b", "every micro-batch crosses v p - 1 boundaries between ranks, and the warm-up is longer"),
    "q4": Answer("d", "the chain of backwards goes through the input parts alone"),
    "q5": Answer("a", "rank r holds p - r: the first has the longest way to the loss and back"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
