"""The visible checks of this lab. A table that the student returns is read, carried out and timed here (``dlo_lib.grading.schedules``).

The measure is another table: the library's, on the same sizes and costs.
"""

from __future__ import annotations

from collections import Counter

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.grading.schedules import SLACK, carried_out, complete, holds_no_more, most_held, mostly_there, no_slower, read_rows, read_table
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import B, F, Schedule, in_a_loop

from .hints import HINTS as HINTS
from .quiz import QUIZ
from .twins import contest_case, groups, known, many, shared, size, three

FOR_WEIGHTS = 0.5  # what stays of a micro-batch's activations between input and weight part, as the notebook says
# -- what is asked for


def made(student, t, function: str, ranks: int, micro_batches: int, *per_rank: int) -> tuple[Schedule, str]:
    """The student's table, and the call that made it."""
    sizes = (ranks, micro_batches, *per_rank)
    call = f"{function}({', '.join(map(str, sizes))})"
    return read_table(t, getattr(student, function)(*sizes), in_a_loop(ranks, *per_rank), micro_batches, call), call


def made_mostly(student, t, function: str, *sizes: int) -> tuple[Schedule, str]:
    """The same, where most of its cells are there."""
    schedule, call = made(student, t, function, *sizes)
    mostly_there(t, schedule, call, "FIW" if schedule.splits_backward else "FB")
    return schedule, call


def all_there(student, t, function: str, kinds: str) -> None:
    for ranks, micro_batches in ((1, t.integer(1, 3)), size(t), size(t)):
        complete(t, *made(student, t, function, ranks, micro_batches), kinds)


def as_fast(student, t, function: str, name: str, costs: tuple[float, float, float], sizes: tuple[int, ...], lesson: str) -> None:
    """The student's table takes no longer than the library's ``name``."""
    schedule, call = made_mostly(student, t, function, *sizes)
    of_a_stage = shared(*costs, *sizes[2:])
    no_slower(t, carried_out(t, schedule, of_a_stage, call), simulate(known(name, *sizes), of_a_stage), call, lesson)


def as_small(student, t, function: str, name: str, sizes: tuple[int, ...], lesson: str) -> None:
    """The student's table holds no more than the library's ``name``."""
    schedule, call = made_mostly(student, t, function, *sizes)
    holds_no_more(t, schedule, most_held(known(name, *sizes)), call, lesson)


# -- 1 · naive


@check("naive", points=1)
def check_naive_complete(student, t):
    "Every action is there, once, on its rank"
    all_there(student, t, "naive_rows", "FB")


@check("naive", points=2)
def check_one_at_a_time(student, t):
    "One micro-batch at a time, one rank at work"
    ranks, micro_batches = size(t)
    schedule, call = made_mostly(student, t, "naive_rows", ranks, micro_batches)
    run = carried_out(t, schedule, shared(*three(t)), call)
    lesson = "Without a pipeline the next micro-batch begins when the last one has come back."
    holds_no_more(t, schedule, most_held(known("naive", ranks, micro_batches)), call, lesson)
    t.that(
        bool(run.makespan >= sum(run.busy) * (1 - SLACK)),
        "{call}: two ranks compute at the same time. That is already a pipeline: here the next micro-batch waits for the last one's backward.",
        call=call,
    )


# -- 2 · AFAB


@check("afab", points=1)
def check_afab_complete(student, t):
    "Every action is there, once, on its rank"
    all_there(student, t, "afab_rows", "FB")


@check("afab", points=2)
def check_afab_fills_and_drains(student, t):
    "No rank waits longer than the filling and the draining of the pipeline"
    lesson = "Ranks must take micro-batches in the same order, or one waits for what another has put off."
    for sizes in (size(t), size(t)):
        as_fast(student, t, "afab_rows", "AFAB", three(t), sizes, lesson)


# -- 3 · 1F1B


@check("one_f_one_b", points=1)
def check_1f1b_complete(student, t):
    "Every action is there, once, on its rank"
    all_there(student, t, "one_f_one_b_rows", "FB")


@check("one_f_one_b", points=3)
def check_1f1b_bubble(student, t):
    "It runs, with the bubble of AFAB"
    lesson = "Count the forwards before a rank's first backward: enough to bridge the way to the last rank and back, no fewer."
    for sizes in (size(t), many(t)):
        as_fast(student, t, "one_f_one_b_rows", "1F1B", three(t), sizes, lesson)


@check("one_f_one_b", points=2)
def check_1f1b_memory(student, t):
    "Rank r holds no more micro-batches than there are ranks from it on"
    lesson = "A rank goes back as soon as it can: its warm-up is the number of ranks after it, and then one backward follows each forward."
    for sizes in (size(t), many(t)):
        as_small(student, t, "one_f_one_b_rows", "1F1B", sizes, lesson)


# -- 4 · interleaved


@check("interleaved", points=1)
def check_interleaved_complete(student, t):
    "Every action is there, once, on its rank"
    for sizes in (groups(t), groups(t)):
        complete(t, *made(student, t, "interleaved_rows", *sizes, 2), "FB")


@check("interleaved", points=3)
def check_interleaved_bubble(student, t):
    "It runs, with half the bubble for two stages a rank"
    lesson = (
        "Forwards go through a rank's stages upwards, backwards downwards, p micro-batches at a time; "
        "before the first backward come (v - 1) p + 2 (p - r - 1) forwards, and one in each turn."
    )
    for sizes in (groups(t), groups(t)):
        as_fast(student, t, "interleaved_rows", "interleaved", (1.0, t.uniform(0.9, 1.1), 1.0), (*sizes, 2), lesson)


@check("interleaved", points=2)
def check_interleaved_memory(student, t):
    "It does not hold every micro-batch"
    lesson = "After the warm-up one backward follows each forward, whatever their stages."
    as_small(student, t, "interleaved_rows", "interleaved", (*groups(t, fewest=4), 2), lesson)


# -- 5 · memory


def same_held(student, t, name: str, ranks: int, micro_batches: int, per_rank: int, lesson: str) -> None:
    for rank, want in enumerate(most_held(known(name, ranks, micro_batches, per_rank))):
        call = f'held("{name}", {ranks}, {micro_batches}, {per_rank}, {rank})'
        got = t.number(student.held(name, ranks, micro_batches, per_rank, rank), call)
        t.that(bool(abs(got - want) < SLACK), "{call} is {got:g}; the table holds {want:g}. " + lesson, call=call, got=got, want=want)


@check("memory", points=1)
def check_held_all(student, t):
    "naive and AFAB"
    for name in ("naive", "AFAB"):
        same_held(student, t, name, *size(t), 1, "Count the forwards in the row before the first backward.")


@check("memory", points=1)
def check_held_1f1b(student, t):
    "1F1B and ZB-H1"
    for name in ("1F1B", "ZB-H1"):
        same_held(student, t, name, *size(t), 1, "Its warm-up, and the forward of the first turn. The rank matters.")


@check("memory", points=2)
def check_held_interleaved(student, t):
    "Interleaved 1F1B"
    lesson = "Count the warm-up and one more, in stages, at most all there are; a stage has one part in v of the rank's layers."
    for per_rank, rounds in ((2, t.integer(4, 6)), (3, t.integer(4, 6)), (2, 1)):
        ranks = t.integer(2, 4)
        same_held(student, t, "interleaved", ranks, ranks * rounds, per_rank, lesson)


# -- 6 · ZB-H1


@check("zb_h1", points=1)
def check_parts_complete(student, t):
    "Every forward, input part and weight part is there, once, on its rank"
    all_there(student, t, "zb_h1_rows", "FIW")


@check("zb_h1", points=3)
def check_weights_fill_the_bubble(student, t):
    "It runs, and weight parts fill the drain"
    lesson = (
        "Keep the forwards of 1F1B. A weight part done while others wait only delays them: rank r keeps the last r of them for the drain."
    )
    for sizes in (size(t), many(t)):
        as_fast(student, t, "zb_h1_rows", "ZB-H1", (1.0, 1.0, 1.0), sizes, lesson)


@check("zb_h1", points=2)
def check_zb_h1_memory(student, t):
    "The activations of 1F1B, no more"
    for sizes in (size(t), many(t)):
        as_small(student, t, "zb_h1_rows", "1F1B", sizes, "The forwards of ZB-H1 are those of 1F1B: only the weight parts move.")


# -- 7 · bubble


def same_waiting(student, t, name: str, sizes: tuple[int, int, int], costs: tuple[float, float, float], lesson: str) -> None:
    want = max(simulate(known(name, *sizes), shared(*costs, sizes[2])).bubble)
    call = f'waiting("{name}", {", ".join(map(str, sizes))}, ' + ", ".join(f"{cost:.3g}" for cost in costs) + ")"
    got = t.number(student.waiting(name, *sizes, *costs), call)
    message = "{call} is {got:.4g}, the simulator waits {want:.4g}. " + lesson
    t.that(bool(abs(got - want) <= SLACK * (1 + want)), message, call=call, got=got, want=want)


@check("bubble", points=1)
def check_waiting_naive(student, t):
    "naive"
    for _ in range(3):
        same_waiting(student, t, "naive", (*size(t), 1), three(t), "While one rank computes, the p - 1 others wait: for every micro-batch.")


@check("bubble", points=1)
def check_waiting_one_stage(student, t):
    "AFAB and 1F1B"
    for name in ("AFAB", "1F1B"):
        same_waiting(student, t, name, (*size(t), 1), three(t), "The last rank waits for p - 1 forwards, the first for p - 1 backwards.")


@check("bubble", points=2)
def check_waiting_interleaved(student, t):
    "Interleaved 1F1B"
    lesson = "Filling takes p - 1 forwards of one stage, and a stage has one part in v of a rank's layers."
    for per_rank in (2, 3):
        same_waiting(student, t, "interleaved", (*groups(t), per_rank), three(t), lesson)


@check("bubble", points=1)
def check_waiting_zb_h1(student, t):
    "ZB-H1, when the three parts cost the same"
    cost = t.uniform(0.5, 2.0)
    lesson = "In the drain each rank after the first has one weight part to do for each input part it waits for."
    same_waiting(student, t, "ZB-H1", (*size(t), 1), (cost, cost, cost), lesson)


# -- 9 · contest


def entered(student, t, case: dict) -> Simulation:
    """The student's table for ``case``, carried out; complete, with as many stages on each rank, and under the cap."""
    ranks, micro_batches, cap = case["ranks"], case["micro_batches"], case["cap"]
    call = f"contest_rows({ranks}, {micro_batches}, {cap:g}, ...)"
    rows = student.contest_rows(ranks, micro_batches, cap, case["costs"])
    owner = {action.stage: rank for rank, row in enumerate(read_rows(t, rows, ranks, call)) for action in row if action.kind is F}
    stages_of = Counter(owner.values())
    equal = sorted(owner) == list(range(len(owner))) and len(stages_of) == ranks and len(set(stages_of.values())) == 1
    t.that(equal, "{call}: every rank needs the same number of stages, numbered from 0 without gaps", call=call)
    schedule = read_table(t, rows, [owner[stage] for stage in range(len(owner))], micro_batches, call)
    whole = any(action.kind is B for row in schedule.rows for action in row)
    complete(t, schedule, call, "FB" if whole else "FIW")
    holds_no_more(t, schedule, [cap] * ranks, call, "That is the cap; open weight parts count half.", FOR_WEIGHTS)
    per_rank = schedule.stages // ranks  # a message costs what it costs; what is computed is shared out
    costs = {name: cost if name == "send" else cost / per_rank for name, cost in case["costs"].items()}
    return carried_out(t, schedule, Costs(**costs), call)


@check("contest", points=2)
def check_under_the_cap(student, t):
    "It runs, under every cap from one micro-batch on"
    for cap in (1, 1.5, t.integer(2, 6)):
        entered(student, t, contest_case(t, *size(t), cap))


@check("contest", points=1)
def check_few_in_the_contest(student, t):
    "Fewer micro-batches than ranks, cap p: no slower than 1F1B"
    for ranks in (t.integer(4, 6), t.integer(4, 6)):
        case = contest_case(t, ranks, t.integer(2, ranks - 1), ranks)
        run, plain = entered(student, t, case), simulate(known("1F1B", ranks, case["micro_batches"]), Costs(**case["costs"]))
        t.that(
            bool(run.bubble_ratio <= plain.bubble_ratio + SLACK),
            "{ranks} ranks, {micro_batches} micro-batches, cap {ranks}: your bubble is {got:.3f} of the ideal time, that of 1F1B {want:.3f}. "
            "1F1B fits this cap: a table of your own should not be worse.",
            ranks=ranks, micro_batches=case["micro_batches"], got=run.bubble_ratio, want=plain.bubble_ratio,
        )  # fmt: skip


# -- quiz

complete_quiz = quiz_complete(QUIZ, points=1)
