"""The visible checks of this lab: tables that students return are read, carried out and timed here, without the student's code.

A table comes as rows of cells such as ``2F5``. Whether each action is there, and what a rank holds, is read off the rows; whether ranks wait
for each other, and how long, is found by carrying the rows out. The measure is another table: the library's, on the same sizes and costs.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from dlo_lib.errors import UserError
from dlo_lib.grading.contract import Wrong, check
from dlo_lib.grading.quiz import Question, quiz_complete
from dlo_lib.grading.twins import twin
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import COMPUTE, Action, B, F, I, Schedule, W, in_a_loop
from dlo_lib.text import tr

MOST_CELLS = 20_000
LONGEST_CELL = 40  # characters
FOR_WEIGHTS = 0.5  # what stays of a micro-batch's activations between input and weight part, as the notebook says
SLACK = 1e-6

# -- reading a table


def table(t, rows, placement: tuple[int, ...], micro_batches: int, call: str) -> Schedule:
    """The student's rows; every cell is an action that exists, on the rank that has its stage."""
    ranks, stages = 1 + max(placement), len(placement)
    made = as_rows(t, rows, ranks, call)
    for rank, row in enumerate(made):
        for position, action in enumerate(row):
            where = f"{call}, rank {rank}, cell {position} ({action})"
            t.that(
                action.stage < stages and action.micro_batch < micro_batches,
                "{where}: there are {stages} stages and {micro_batches} micro-batches, both counted from 0",
                where=where,
                stages=stages,
                micro_batches=micro_batches,
            )
            owner = placement[action.stage]
            t.that(owner == rank, "{where}: stage {stage} lies on rank {owner}, not here", where=where, stage=action.stage, owner=owner)
    return Schedule(call, placement, micro_batches, made)


def as_rows(t, rows, ranks: int, call: str) -> tuple[tuple[Action, ...], ...]:
    """The rows as actions."""
    t.that(
        type(rows) in (list, tuple) and len(rows) == ranks,
        "{call} should be {ranks} lists of cells, one for each rank, not {rows}",
        call=call,
        ranks=ranks,
        rows=rows,
    )
    for rank, row in enumerate(rows):
        t.that(type(row) in (list, tuple), "{call}, rank {rank}: a row is a list of cells, not {row}", call=call, rank=rank, row=row)
    t.that(sum(map(len, rows)) <= MOST_CELLS, "{call} has more cells than any of these schedules needs", call=call)
    return tuple(tuple(action(t, cell, rank, place, call) for place, cell in enumerate(row)) for rank, row in enumerate(rows))


def action(t, cell, rank: int, position: int, call: str) -> Action:
    """The action that a cell holds."""
    read = None
    if type(cell) is str and len(cell) <= LONGEST_CELL:
        try:
            read = Action.parse(cell)
        except UserError:
            read = None  # said below, with its place
    t.that(
        read is not None and read.kind in COMPUTE,
        "{call}, rank {rank}, cell {position} is {cell}: write stage, F, B, I or W, and micro-batch, such as 2F5",
        call=call,
        rank=rank,
        position=position,
        cell=cell,
    )
    return read


def complete(t, schedule: Schedule, kinds: str, call: str) -> None:
    """Each forward and each backward (``kinds`` "FB", or "FIW" in parts) is there once."""
    found = Counter(each for row in schedule.rows for each in row)
    for each, times in found.items():
        t.that(times == 1, "{call}: {cell} is there {times} times; every action is done once", call=call, cell=str(each), times=times)
        t.that(
            each.kind.value in kinds,
            "{call}: {cell} has a kind that this schedule does not use: it is made of {kinds}",
            call=call,
            cell=str(each),
            kinds=", ".join(kinds),
        )
    lessons = {
        "F": "Every micro-batch goes through every stage.",
        "B": "Without its backward the micro-batch is missing from the gradient: the pipeline has to be flushed before the optimiser's step.",
        "I": "The stage before waits for this gradient.",
        "W": "Without its weight part the micro-batch is missing from the gradient.",
    }
    for kind in (F, B, I, W):
        if kind.value in kinds:
            wanted = [Action(kind, stage, each) for stage in range(schedule.stages) for each in range(schedule.micro_batches)]
            lacking = [each for each in wanted if each not in found]
            t.that(
                not lacking,
                "{call}: {cell} is missing on rank {rank}. " + lessons[kind.value],
                call=call,
                cell=str(lacking[0]) if lacking else "",
                rank=schedule.placement[lacking[0].stage] if lacking else 0,
            )


def carried_out(t, schedule: Schedule, costs: Costs, call: str) -> Simulation:
    """The table in time; if its ranks wait for each other for ever, the cells that do are named."""
    try:
        run = simulate(schedule, costs)
    except UserError as error:
        lesson = tr("A rank does its row from left to right and waits at each cell for what the cell needs.")
        raise Wrong(tr("{call} cannot be carried out. {why}. {lesson}", call=call, why=str(error), lesson=lesson), lesson) from None
    t.that(run.makespan > 0, "{call} takes no time at all", call=call)
    return run


def no_slower(t, run: Simulation, best: Simulation, call: str, lesson: str) -> None:
    """``run`` ends no later than ``best``; if it does, the longest wait inside a row is named."""
    gaps = [
        (after - before, rank, place + 1)
        for rank, row in enumerate(run.spans)
        for place, ((_, before), (after, _)) in enumerate(pairwise(row))
    ]
    gap, rank, place = max(gaps, key=lambda found: (found[0], -found[1]), default=(0.0, 0, 0))
    cell = str(run.schedule.rows[rank][place]) if gaps else ""
    t.that(
        run.makespan <= best.makespan * (1 + SLACK),
        "{call} takes {got:.4g}, and {want:.4g} is possible: rank {rank} waits {gap:.3g} before cell {place} ({cell}). " + lesson,
        call=call,
        got=run.makespan,
        want=best.makespan,
        rank=rank,
        gap=gap,
        place=place,
        cell=cell,
    )


def most_held(schedule: Schedule, for_weights: float = 0.0) -> list[float]:
    """The most that each rank holds, read off its row: 1 from a forward on, ``for_weights`` after the input part, 0 after both."""
    change = {F: 1.0, B: -1.0, I: for_weights - 1.0, W: -for_weights}
    most = []
    for row in schedule.rows:
        now, peak = 0.0, 0.0
        for each in row:
            now += change[each.kind]
            peak = max(peak, now)
        most.append(peak * schedule.ranks / schedule.stages)
    return most


def holds_no_more(t, schedule: Schedule, most: list[float], call: str, lesson: str) -> None:
    for rank, (got, want) in enumerate(zip(most_held(schedule), most)):
        t.that(
            got <= want + SLACK,
            "{call}: rank {rank} holds up to {got:g} micro-batches, {want:g} are enough. " + lesson,
            call=call,
            rank=rank,
            got=got,
            want=want,
        )


# -- twins: the library's tables, and how long they take

MAKERS = {
    "naive": schedules.naive,
    "AFAB": schedules.afab,
    "1F1B": schedules.one_f_one_b,
    "ZB-H1": schedules.zb_h1,
    "ZB-H2": schedules.zb_h2,
}


@twin
def known(name: str, ranks: int, micro_batches: int, per_rank: int = 1) -> Schedule:
    """The library's table."""
    return schedules.interleaved(ranks, micro_batches, per_rank) if name == "interleaved" else MAKERS[name](ranks, micro_batches)


def shared(forward: float, input_gradient: float, weight_gradient: float, per_rank: int = 1, send: float = 0.0) -> Costs:
    """Costs of a stage that is one of ``per_rank`` equal ones; those given are of all layers of a rank."""
    return Costs(forward / per_rank, input_gradient / per_rank, weight_gradient / per_rank, send)


def size(t, most_ranks: int = 5) -> tuple[int, int]:
    """Ranks, and micro-batches that keep them all at work."""
    ranks = t.integer(2, most_ranks)
    return ranks, ranks + t.integer(1, 6)


def spread(t) -> Costs:
    """Costs that differ, with backwards longer than forwards."""
    return shared(t.uniform(0.8, 1.2), t.uniform(1.0, 1.4), t.uniform(0.6, 0.9))


# -- 1 · naive


def naive_table(student, t, ranks: int, micro_batches: int) -> tuple[Schedule, str]:
    call = f"naive_rows({ranks}, {micro_batches})"
    return table(t, student.naive_rows(ranks, micro_batches), in_a_loop(ranks), micro_batches, call), call


@check("naive", points=1)
def check_naive_complete(student, t):
    "Every action is there, once, on its rank"
    for ranks, micro_batches in ((1, t.integer(1, 3)), size(t), size(t)):
        schedule, call = naive_table(student, t, ranks, micro_batches)
        complete(t, schedule, "FB", call)


@check("naive", points=2)
def check_one_at_a_time(student, t):
    "One micro-batch at a time, one rank at work"
    ranks, micro_batches = size(t)
    schedule, call = naive_table(student, t, ranks, micro_batches)
    run, best = carried_out(t, schedule, spread(t), call), simulate(known("naive", ranks, micro_batches))
    t.that(
        max(run.in_flight()) <= max(best.in_flight()),
        "{call}: a rank holds {got} micro-batches. Without a pipeline the next one begins when the last has come back.",
        call=call,
        got=max(run.in_flight()),
    )
    t.that(
        bool(run.makespan >= sum(run.busy) * (1 - SLACK)),
        "{call}: two ranks compute at the same time. That is already a pipeline: here the next micro-batch waits for the last one's backward.",
        call=call,
    )


# -- 2 · AFAB


def afab_table(student, t, ranks: int, micro_batches: int) -> tuple[Schedule, str]:
    call = f"afab_rows({ranks}, {micro_batches})"
    return table(t, student.afab_rows(ranks, micro_batches), in_a_loop(ranks), micro_batches, call), call


@check("afab", points=1)
def check_afab_complete(student, t):
    "Every action is there, once, on its rank"
    for ranks, micro_batches in ((1, t.integer(1, 3)), size(t), size(t)):
        schedule, call = afab_table(student, t, ranks, micro_batches)
        complete(t, schedule, "FB", call)


@check("afab", points=2)
def check_afab_fills_and_drains(student, t):
    "No rank waits longer than the filling and the draining of the pipeline"
    for ranks, micro_batches in (size(t), size(t)):
        costs = spread(t)
        schedule, call = afab_table(student, t, ranks, micro_batches)
        best = simulate(known("AFAB", ranks, micro_batches), costs)
        lesson = "Ranks must take micro-batches in the same order, or one waits for what another has put off."
        no_slower(t, carried_out(t, schedule, costs, call), best, call, lesson)


# -- 3 · 1F1B


def one_f_one_b_table(student, t, ranks: int, micro_batches: int) -> tuple[Schedule, str]:
    call = f"one_f_one_b_rows({ranks}, {micro_batches})"
    return table(t, student.one_f_one_b_rows(ranks, micro_batches), in_a_loop(ranks), micro_batches, call), call


@check("one_f_one_b", points=1)
def check_1f1b_complete(student, t):
    "Every action is there, once, on its rank"
    for ranks, micro_batches in ((1, t.integer(1, 3)), size(t), size(t)):
        schedule, call = one_f_one_b_table(student, t, ranks, micro_batches)
        complete(t, schedule, "FB", call)


@check("one_f_one_b", points=3)
def check_1f1b_bubble(student, t):
    "It runs, with the bubble of AFAB"
    for ranks, micro_batches in (size(t), (t.integer(6, 8), 12)):
        costs = spread(t)
        schedule, call = one_f_one_b_table(student, t, ranks, micro_batches)
        best = simulate(known("1F1B", ranks, micro_batches), costs)
        lesson = "Count the forwards before a rank's first backward: enough to bridge the way to the last rank and back, no fewer."
        no_slower(t, carried_out(t, schedule, costs, call), best, call, lesson)


@check("one_f_one_b", points=2)
def check_1f1b_memory(student, t):
    "Rank r holds no more micro-batches than there are ranks from it on"
    for ranks, micro_batches in (size(t), (t.integer(6, 8), t.integer(10, 16))):
        schedule, call = one_f_one_b_table(student, t, ranks, micro_batches)
        lesson = (
            "A rank goes back as soon as it can: its warm-up is the number of ranks after it, and then one backward follows each forward."
        )
        holds_no_more(t, schedule, most_held(known("1F1B", ranks, micro_batches)), call, lesson)


# -- 4 · interleaved


def interleaved_table(student, t, ranks: int, micro_batches: int, per_rank: int) -> tuple[Schedule, str]:
    call = f"interleaved_rows({ranks}, {micro_batches}, {per_rank})"
    rows = student.interleaved_rows(ranks, micro_batches, per_rank)
    return table(t, rows, in_a_loop(ranks, per_rank), micro_batches, call), call


def groups(t) -> tuple[int, int]:
    """Ranks, and a multiple of them."""
    ranks = t.integer(2, 4)
    return ranks, ranks * t.integer(2, 4)


@check("interleaved", points=1)
def check_interleaved_complete(student, t):
    "Every action is there, once, on its rank"
    for ranks, micro_batches in (groups(t), groups(t)):
        schedule, call = interleaved_table(student, t, ranks, micro_batches, 2)
        complete(t, schedule, "FB", call)


@check("interleaved", points=3)
def check_interleaved_bubble(student, t):
    "It runs, with half the bubble for two stages a rank"
    for ranks, micro_batches in (groups(t), (4, 8)):
        schedule, call = interleaved_table(student, t, ranks, micro_batches, 2)
        costs = shared(1.0, t.uniform(0.9, 1.1), 1.0, per_rank=2)
        best = simulate(known("interleaved", ranks, micro_batches, 2), costs)
        lesson = (
            "Forwards go through a rank's stages upwards, backwards downwards, p micro-batches at a time; "
            "before the first backward come (v - 1) p + 2 (p - r - 1) forwards, and one in each turn."
        )
        no_slower(t, carried_out(t, schedule, costs, call), best, call, lesson)


@check("interleaved", points=2)
def check_interleaved_memory(student, t):
    "It does not hold every micro-batch"
    ranks = t.integer(2, 4)
    micro_batches = ranks * t.integer(4, 6)
    schedule, call = interleaved_table(student, t, ranks, micro_batches, 2)
    lesson = "After the warm-up one backward follows each forward, whatever their stages."
    holds_no_more(t, schedule, most_held(known("interleaved", ranks, micro_batches, 2)), call, lesson)


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
    for per_rank, rounds in ((2, t.integer(4, 6)), (3, t.integer(4, 6)), (2, 1)):
        ranks = t.integer(2, 4)
        lesson = "Count the warm-up and one more, in stages, at most all there are; a stage has one part in v of the rank's layers."
        same_held(student, t, "interleaved", ranks, ranks * rounds, per_rank, lesson)


# -- 6 · ZB-H1


def zb_h1_table(student, t, ranks: int, micro_batches: int) -> tuple[Schedule, str]:
    call = f"zb_h1_rows({ranks}, {micro_batches})"
    return table(t, student.zb_h1_rows(ranks, micro_batches), in_a_loop(ranks), micro_batches, call), call


@check("zb_h1", points=1)
def check_parts_complete(student, t):
    "Every forward, input part and weight part is there, once, on its rank"
    for ranks, micro_batches in ((1, t.integer(1, 3)), size(t), size(t)):
        schedule, call = zb_h1_table(student, t, ranks, micro_batches)
        complete(t, schedule, "FIW", call)


@check("zb_h1", points=3)
def check_weights_fill_the_bubble(student, t):
    "It runs, and weight parts fill the drain"
    for ranks, micro_batches in (size(t), (t.integer(6, 8), 12)):
        costs = shared(1.0, 1.0, 1.0)
        schedule, call = zb_h1_table(student, t, ranks, micro_batches)
        best = simulate(known("ZB-H1", ranks, micro_batches), costs)
        lesson = "A weight part done while work is there for others only delays them: rank r keeps the last r of them for the drain."
        no_slower(t, carried_out(t, schedule, costs, call), best, call, lesson)


@check("zb_h1", points=2)
def check_zb_h1_memory(student, t):
    "The activations of 1F1B, no more"
    for ranks, micro_batches in (size(t), (t.integer(6, 8), t.integer(16, 20))):
        schedule, call = zb_h1_table(student, t, ranks, micro_batches)
        lesson = "The forwards of ZB-H1 are those of 1F1B: only the weight parts move."
        holds_no_more(t, schedule, most_held(known("1F1B", ranks, micro_batches)), call, lesson)


# -- 7 · bubble


def same_waiting(
    student, t, name: str, ranks: int, micro_batches: int, per_rank: int, costs: tuple[float, float, float], lesson: str
) -> None:
    run = simulate(known(name, ranks, micro_batches, per_rank), shared(*costs, per_rank=per_rank))
    got = t.number(student.waiting(name, ranks, micro_batches, per_rank, *costs), "waiting(...)")
    call = f'waiting("{name}", {ranks}, {micro_batches}, {per_rank}, ' + ", ".join(f"{cost:.3g}" for cost in costs) + ")"
    want = max(run.bubble)
    t.that(
        bool(abs(got - want) <= SLACK * (1 + want)),
        "{call} is {got:.4g}, the simulator waits {want:.4g}. " + lesson,
        call=call,
        got=got,
        want=want,
    )


def three(t) -> tuple[float, float, float]:
    """F, I and W of a rank's layers, with W the smallest."""
    return t.uniform(0.8, 1.2), t.uniform(1.0, 1.5), t.uniform(0.5, 0.8)


@check("bubble", points=1)
def check_waiting_naive(student, t):
    "naive"
    for _ in range(3):
        same_waiting(student, t, "naive", *size(t), 1, three(t), "While one rank computes, the p - 1 others wait: for every micro-batch.")


@check("bubble", points=1)
def check_waiting_one_stage(student, t):
    "AFAB and 1F1B"
    for name in ("AFAB", "1F1B"):
        same_waiting(student, t, name, *size(t), 1, three(t), "The last rank waits for p - 1 forwards, the first for p - 1 backwards.")


@check("bubble", points=2)
def check_waiting_interleaved(student, t):
    "Interleaved 1F1B"
    for per_rank in (2, 3):
        ranks = t.integer(2, 4)
        lesson = "Filling takes p - 1 forwards of one stage, and a stage has one part in v of a rank's layers."
        same_waiting(student, t, "interleaved", ranks, ranks * t.integer(2, 4), per_rank, three(t), lesson)


@check("bubble", points=1)
def check_waiting_zb_h1(student, t):
    "ZB-H1, when the three parts cost the same"
    cost = t.uniform(0.5, 2.0)
    lesson = "In the drain each rank after the first has one weight part to do for each input part it waits for."
    same_waiting(student, t, "ZB-H1", *size(t), 1, (cost, cost, cost), lesson)


# -- 9 · contest


def contest_case(t, ranks: int, micro_batches: int, cap: float) -> dict:
    """Costs as the contest gives them: equal parts or not, with and without a price on sending."""
    costs = {"forward": 1.0, "input_gradient": t.uniform(0.95, 1.05), "weight_gradient": t.uniform(0.9, 1.0), "send": t.choice([0.0, 0.02])}
    return {"ranks": ranks, "micro_batches": micro_batches, "cap": cap, "costs": costs}


def entered(student, t, case: dict) -> Simulation:
    """The student's table for ``case``, carried out; complete, with as many stages on each rank, and under the cap."""
    ranks, micro_batches, cap = case["ranks"], case["micro_batches"], case["cap"]
    call = f"contest_rows({ranks}, {micro_batches}, {cap:g}, ...)"
    rows = student.contest_rows(ranks, micro_batches, cap, case["costs"])
    owner = {each.stage: rank for rank, row in enumerate(as_rows(t, rows, ranks, call)) for each in row if each.kind is F}
    t.that(
        sorted(owner) == list(range(len(owner)))
        and len(set(Counter(owner.values()).values())) == 1
        and set(owner.values()) == set(range(ranks)),
        "{call}: every rank needs the same number of stages, numbered from 0 without gaps",
        call=call,
    )
    placement = tuple(owner[stage] for stage in range(len(owner)))
    schedule = table(t, rows, placement, micro_batches, call)
    whole = any(each.kind is B for row in schedule.rows for each in row)
    complete(t, schedule, "FB" if whole else "FIW", call)
    for rank, got in enumerate(most_held(schedule, FOR_WEIGHTS)):
        t.that(
            got <= cap + SLACK,
            "{call}: rank {rank} holds {got:g}, the cap is {cap:g}. Open weight parts count half.",
            call=call,
            rank=rank,
            got=got,
            cap=float(cap),
        )
    return carried_out(t, schedule, Costs(**each_stage(case["costs"], len(placement) // ranks)), call)


def each_stage(costs: dict[str, float], per_rank: int) -> dict[str, float]:
    """Costs of one of ``per_rank`` equal stages: only what is computed is shared."""
    return {name: cost if name == "send" else cost / per_rank for name, cost in costs.items()}


def reaches(t, run: Simulation, target: float, case: dict, lesson: str) -> None:
    t.that(
        bool(run.bubble_ratio <= target + SLACK),
        "{ranks} ranks, {micro_batches} micro-batches, cap {cap:g}: your bubble is {got:.3f} of the ideal time, the target {target:.3f}. "
        + lesson,
        ranks=case["ranks"],
        micro_batches=case["micro_batches"],
        cap=float(case["cap"]),
        got=run.bubble_ratio,
        target=target,
    )


@check("contest", points=2)
def check_under_the_cap(student, t):
    "It runs, under every cap from one micro-batch on"
    for cap in (1, 1.5, t.integer(2, 6)):
        ranks, micro_batches = size(t)
        entered(student, t, contest_case(t, ranks, micro_batches, cap))


@check("contest", points=1)
def check_few_in_the_contest(student, t):
    "Fewer micro-batches than ranks, cap p: no slower than 1F1B"
    for ranks in (t.integer(4, 6), t.integer(4, 6)):
        case = contest_case(t, ranks, t.integer(2, ranks - 1), ranks)
        best = simulate(known("1F1B", ranks, case["micro_batches"]), Costs(**case["costs"]))
        reaches(t, entered(student, t, case), best.bubble_ratio, case, "1F1B fits this cap: a table of your own should not be worse.")


# -- quiz

QUIZ = {
    "q1": Question(
        "8 ranks, 32 micro-batches, 1F1B. You go to 64 micro-batches of half the size. The bubble, as part of the ideal time ...",
        {"a": "is halved", "b": "stays the same", "c": "is a quarter", "d": "doubles"},
    ),
    "q2": Question(
        "What does 1F1B gain over AFAB?",
        {"a": "a smaller bubble", "b": "fewer messages", "c": "less memory", "d": "a backward in two parts"},
    ),
    "q3": Question(
        "What does interleaving with v stages a rank cost?",
        {
            "a": "v copies of the weights",
            "b": "v times as many messages, and more activations",
            "c": "v times as many micro-batches",
            "d": "nothing: the bubble is divided by v for free",
        },
    ),
    "q4": Question(
        "Why may the weight part of a backward wait, and the input part not?",
        {
            "a": "the weight part is shorter",
            "b": "the input part needs more memory",
            "c": "the input part needs the optimiser",
            "d": "the stage before waits for the input part; only the optimiser waits for the weight part",
        },
    ),
    "q5": Question(
        "In 1F1B with many micro-batches, which rank holds the most activations?",
        {"a": "the first", "b": "the last", "c": "one in the middle", "d": "all the same"},
    ),
}

complete_quiz = quiz_complete(QUIZ, points=1)

# -- hints

HINTS = {
    "naive": [
        "Stage r lies on rank r. What does a rank do for one micro-batch?",
        "A row holds F and B of micro-batch 0, then of micro-batch 1, ... The waiting comes by itself: a cell begins when what it needs is there.",
        'One list for each rank; in it f"{rank}F{i}" and f"{rank}B{i}" for i from 0 to micro_batches - 1.',
    ],
    "afab": [
        "The cells are those of the naive table, in another order.",
        "Two loops over the micro-batches in a row, one after the other. Does the order within the second loop matter?",
        "[F of all i] + [B of all i]: the same order of micro-batches on every rank.",
    ],
    "one_f_one_b": [
        "Draw the last rank first: it can go back at once. How many forwards must rank r do before its first backward can come?",
        "Rank r needs a warm-up of p - r - 1 forwards (or all of them, if there are fewer micro-batches). Then F, B, F, B, ... and the rest of the backwards.",
        "ahead = min(p - r - 1, m); for done in range(m): a forward of micro-batch done + ahead if there is one, then the backward of done.",
    ],
    "interleaved": [
        "Write two lists for a rank first: the order of its forwards, over all its stages, and the order of its backwards.",
        "Groups of p micro-batches: a group goes through stage r, then r + p, ... The backwards take the same groups, with the rank's last stage first.",
        "ahead = (v - 1) p + 2 (p - r - 1), at most m v; then forwards[done + ahead] if there is one, backwards[done], for done in range(m v).",
    ],
    "memory": [
        "Read a row of the table from the left and count: +1 at a forward, -1 at a backward. Where is the count largest?",
        "AFAB: at the last forward. 1F1B: at the forward of the first turn, so warm-up + 1, unless there are fewer micro-batches.",
        "min(m, p - r) for 1F1B and ZB-H1; min(m v, warm-up + 1) / v for interleaved, with the warm-up that you wrote.",
    ],
    "zb_h1": [
        "Begin with your 1F1B and write I where there is B. Where is each W free to go?",
        "Rank r keeps up to r weight parts open: after the input part of micro-batch i comes the weight part of micro-batch i - r.",
        "As in 1F1B: F of done + ahead, I of done, then W of done - r if done >= r; at the end the W that are left.",
    ],
    "bubble": [
        "Look at a drawing. Add up the white of one rank: before its first cell, between, and after its last.",
        "Filling: p - 1 forwards of one stage. Draining: p - 1 backwards of one stage. In the naive table both happen for each micro-batch.",
        "naive m (p-1)(F+I+W); AFAB and 1F1B without the m; interleaved divided by v; in ZB-H1 each step of the drain has a W to do: F+I-W.",
    ],
    "contest": [
        "`timed(rows, **costs)` and `most_held(rows)` are yours: make several tables, keep those under the cap, return the one with the smallest bubble.",
        "For a cap below p, 1F1B with a shorter warm-up runs: it is slower, but legal. For a cap of p, ZB-H1. With two stages a rank in a V the fill is half as long.",
        "Make the table by playing the clock: whichever rank can begin something first does. First I, then F if the cap allows, then W. "
        "In a V keep one place free for the stage on the way up.",
    ],
    "quiz": [
        "Each answer is in one of your drawings, or in the table of formulas that you wrote.",
        "q1: (p - 1) / m. q2 and q5: the memory tracks below the drawings. q3: count the arrows between ranks.",
        "q4: who uses the result of I, and who that of W?",
    ],
}
