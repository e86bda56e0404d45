"""The visible checks of this lab read, run and time the tables that the student returns.

Each is compared with the table of the library, on the same sizes and costs
(``dlo_lib.grading.checks.schedules``).
"""

from __future__ import annotations

from collections import Counter

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.schedules import (
    SLACK,
    carried_out,
    complete,
    holds_no_more,
    most_held,
    mostly_there,
    no_slower,
    read_rows,
    read_table,
)
from dlo_lib.labkit import UserError
from dlo_lib.labkit.compare import Mistakes, near, wrong_if
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import Action, B, F, I, Schedule, W, in_a_loop

from .twins import StartCase, contest_case, groups, known, many, shared, short_1f1b, size, start_cases, three

FOR_WEIGHTS = 0.5  # the part of the activations that stays between input part and weight part
# -- what is asked for


def made(student, t, function: str, ranks: int, micro_batches: int, *per_rank: int) -> tuple[Schedule, str]:
    """Return the table of the student, and the call that made it."""
    sizes = (ranks, micro_batches, *per_rank)
    call = f"{function}({', '.join(map(str, sizes))})"
    return read_table(
        t, getattr(student, function)(*sizes), in_a_loop(ranks, *per_rank), micro_batches, call
    ), call


def made_mostly(student, t, function: str, *sizes: int) -> tuple[Schedule, str]:
    """Return the same, and check that the table has most of its cells."""
    schedule, call = made(student, t, function, *sizes)
    mostly_there(t, schedule, call, "FIW" if schedule.splits_backward else "FB")
    return schedule, call


def all_there(student, t, function: str, kinds: str) -> None:
    for ranks, micro_batches in ((1, t.integer(1, 3)), size(t), size(t)):
        complete(t, *made(student, t, function, ranks, micro_batches), kinds)


def as_fast(
    student,
    t,
    function: str,
    name: str,
    costs: tuple[float, float, float],
    sizes: tuple[int, ...],
    lesson: str,
) -> None:
    """Check that the table takes no longer than the library's ``name``."""
    schedule, call = made_mostly(student, t, function, *sizes)
    of_a_stage = shared(*costs, *sizes[2:])
    no_slower(
        t, carried_out(t, schedule, of_a_stage, call), simulate(known(name, *sizes), of_a_stage), call, lesson
    )


def can_run(t, schedule: Schedule, call: str) -> None:
    """Check that the table can run: what a table holds that never ends says nothing."""
    try:
        simulate(schedule, Costs())
    except UserError:
        t.that(False, "{call} cannot be carried out: what it holds is tested when it runs", call=call)


def as_small(student, t, function: str, name: str, sizes: tuple[int, ...], lesson: str) -> None:
    """Check that the table holds no more than the library's ``name``."""
    schedule, call = made_mostly(student, t, function, *sizes)
    can_run(t, schedule, call)
    holds_no_more(t, schedule, most_held(known(name, *sizes)), call, lesson)


# -- 1 · naive


@check("naive", points=3)
def check_one_at_a_time(student, t):
    "Every action once, one micro-batch at a time"
    all_there(student, t, "naive_rows", "FB")
    ranks, micro_batches = size(t)
    schedule, call = made(student, t, "naive_rows", ranks, micro_batches)
    run = carried_out(t, schedule, shared(*three(t)), call)
    lesson = "Without a pipeline the next micro-batch begins after the whole backward of the previous one."
    holds_no_more(t, schedule, most_held(known("naive", ranks, micro_batches)), call, lesson)
    message = (
        "{call}: two ranks compute at the same time. That is already a pipeline: "
        "here the next micro-batch waits for the backward of the previous one."
    )
    t.that(bool(run.makespan >= sum(run.busy) * (1 - SLACK)), message, call=call)


# -- 2 · AFAB


@check("afab", points=2)
def check_afab_fills_and_drains(student, t):
    "Every action once; ranks wait only while the pipeline fills and drains"
    all_there(student, t, "afab_rows", "FB")
    lesson = "All ranks must take the micro-batches in the same order; otherwise one waits for another."
    for sizes in (size(t), size(t)):
        as_fast(student, t, "afab_rows", "AFAB", three(t), sizes, lesson)


@check("afab", points=1)
def check_forwards_first(student, t):
    "All forwards come before the first backward"
    for sizes in (size(t), size(t)):
        schedule, call = made_mostly(student, t, "afab_rows", *sizes)
        for rank, row in enumerate(schedule.rows):
            kinds = [action.kind for action in row]
            first = kinds.index(B) if B in kinds else len(kinds)
            message = (
                "{call}, rank {rank}: {cell} comes before the last forward. In AFAB a rank begins its "
                "backwards only when all its forwards are done; a table that alternates is that of the next "
                "step."
            )
            t.that(
                F not in kinds[first:], message, call=call, rank=rank, cell=str(row[min(first, len(row) - 1)])
            )


# -- 3 · 1F1B


@check("one_f_one_b", points=4)
def check_1f1b_bubble(student, t):
    "Every action once, and the bubble of AFAB, also with fewer micro-batches than ranks"
    few = [(ranks, t.integer(1, ranks - 2)) for ranks in (t.integer(4, 6), t.integer(4, 6))]
    all_there(student, t, "one_f_one_b_rows", "FB")
    for sizes in few:
        complete(t, *made(student, t, "one_f_one_b_rows", *sizes), "FB")
    lesson = (
        "Count the forwards before a rank's first backward: they fill the time until its gradient arrives."
    )
    for sizes in (size(t), many(t), *few):
        as_fast(student, t, "one_f_one_b_rows", "1F1B", three(t), sizes, lesson)


@check("one_f_one_b", points=2)
def check_1f1b_memory(student, t):
    "Rank r holds at most p - r micro-batches"
    lesson = (
        "A rank begins its backwards as early as possible: its warm-up is the number of ranks after it, "
        "and then one backward follows each forward."
    )
    for sizes in (size(t), many(t)):
        as_small(student, t, "one_f_one_b_rows", "1F1B", sizes, lesson)


# -- 4 · interleaved


def backwards_descend(t, schedule: Schedule, call: str) -> None:
    """Check that the backward of a later stage comes first; every table that can run has this order."""
    for rank, row in enumerate(schedule.rows):
        first: dict[int, Action] = {}
        for action in row:
            if action.kind is B:
                earlier = first.setdefault(action.micro_batch, action)
                values = {"call": call, "rank": rank, "earlier": str(earlier), "later": str(action)}
                message = (
                    "{call}, rank {rank}: {earlier} comes before {later}, whose gradient it needs. "
                    "Backwards go from the last stage to the first: take the stages of a rank in descending "
                    "order"
                )
                t.that(earlier.stage >= action.stage, message, **values)


@check("interleaved", points=3)
def check_interleaved_bubble(student, t):
    "Every action once, and 1/v of the bubble for v stages per rank"
    for per_rank in (2, 3):
        schedule, call = made(student, t, "interleaved_rows", *groups(t), per_rank)
        complete(t, schedule, call, "FB")
        backwards_descend(t, schedule, call)
    lesson = (
        "Forwards take the stages of a rank in ascending order, backwards in descending order, p "
        "micro-batches at a time. The warm-up has (v - 1) p + 2 (p - r - 1) forwards; each turn has one "
        "more."
    )
    for per_rank in (2, 2, 3):
        as_fast(
            student,
            t,
            "interleaved_rows",
            "interleaved",
            (1.0, t.uniform(0.9, 1.1), 1.0),
            (*groups(t), per_rank),
            lesson,
        )


def warm_up_of(row: tuple[Action, ...]) -> int:
    """Return the number of forwards before the first turn of a forward and a backward."""
    first = next((place for place, action in enumerate(row) if action.kind is not F), len(row))
    return max(0, first - 1)


@check("interleaved", points=1)
def check_messages_are_hidden(student, t):
    "The warm-up is long enough to hide messages that take time"
    for _ in range(2):
        ranks, send = t.integer(3, 4), t.uniform(0.08, 0.12)
        sizes = (ranks, ranks * t.integer(3, 4), 2)
        schedule, call = made_mostly(student, t, "interleaved_rows", *sizes)
        can_run(t, schedule, call)
        costs = Costs(0.5, 0.5, 0.5, send)
        run, best = carried_out(t, schedule, costs, call), simulate(known("interleaved", *sizes), costs)
        got, want = warm_up_of(schedule.rows[0]), warm_up_of(best.schedule.rows[0])
        t.that(
            bool(run.makespan <= best.makespan * (1 + SLACK)) or got >= want,
            "{call}: the warm-up of rank 0 has {got} forwards, Megatron's {want}. With free messages the "
            "bubble is the same. If a message takes {send:.2f}, your step takes {slow:.4g} instead of "
            "{fast:.4g}: the extra forwards hide the messages, because a forward and its backward are then "
            "further apart",
            call=call,
            got=got,
            want=want,
            send=send,
            slow=run.makespan,
            fast=best.makespan,
        )
        if got <= want:  # a longer warm-up fails the check of memory
            no_slower(t, run, best, call, f"Here a message takes {send:.2f}.")


@check("interleaved", points=2)
def check_interleaved_memory(student, t):
    "No rank holds every micro-batch"
    lesson = "After the warm-up one backward follows each forward, of any stage."
    as_small(student, t, "interleaved_rows", "interleaved", (*groups(t, fewest=5), 2), lesson)


# -- 5 · memory


def same_held(student, t, name: str, ranks: int, micro_batches: int, per_rank: int, lesson: str) -> None:
    for rank, want in enumerate(most_held(known(name, ranks, micro_batches, per_rank))):
        call = f'held("{name}", {ranks}, {micro_batches}, {per_rank}, {rank})'
        got = t.number(student.held(name, ranks, micro_batches, per_rank, rank), call)
        mistakes = {
            "{call} is {value:g}, the warm-up alone: the forward of the first turn is held too": want
            - 1 / per_rank,
            "{call} is {value:g}, counted in stages: a stage has 1/v of the layers of a rank": want
            * per_rank,
        }
        wrong_if(t, got, want, mistakes, call=call, value=got)
        message = "{call} is {got:g}; the table holds {want:g}. " + lesson
        t.that(bool(abs(got - want) < SLACK), message, call=call, got=got, want=want)


@check("memory", points=1)
def check_held_all(student, t):
    "naive and AFAB"
    for name in ("naive", "AFAB"):
        same_held(student, t, name, *size(t), 1, "Count the forwards in the row before the first backward.")


@check("memory", points=1)
def check_held_1f1b(student, t):
    "1F1B and ZB-H1"
    for name in ("1F1B", "ZB-H1"):
        same_held(
            student,
            t,
            name,
            *size(t),
            1,
            "Count the warm-up and the forward of the first turn. They depend on the rank.",
        )


@check("memory", points=1)
def check_held_few(student, t):
    "With few micro-batches a rank holds at most all of them"
    ranks = t.integer(4, 6)
    lesson = "A rank never holds more than the m micro-batches that there are."
    for name in ("1F1B", "ZB-H1"):
        same_held(student, t, name, ranks, t.integer(1, 2), 1, lesson)


@check("memory", points=2)
def check_held_interleaved(student, t):
    "Interleaved 1F1B"
    lesson = "Count the warm-up plus one, in stages, at most m v; a stage has 1/v of the layers of a rank."
    for per_rank, rounds in ((2, t.integer(4, 6)), (3, t.integer(4, 6)), (2, 1)):
        ranks = t.integer(2, 4)
        same_held(student, t, "interleaved", ranks, ranks * rounds, per_rank, lesson)


# -- 6 · ZB-H1


@check("zb_h1", points=3)
def check_weights_fill_the_bubble(student, t):
    "Every forward, input part and weight part once, and weight parts fill the drain"
    all_there(student, t, "zb_h1_rows", "FIW")
    lesson = (
        "Keep the forwards of 1F1B. A weight part that runs too early delays the ranks that wait: "
        "rank r keeps its last r weight parts for the drain."
    )
    for sizes in (size(t), many(t)):
        as_fast(student, t, "zb_h1_rows", "ZB-H1", (1.0, 1.0, 1.0), sizes, lesson)


@check("zb_h1", points=2)
def check_zb_h1_memory(student, t):
    "It holds no more activations than 1F1B"
    for sizes in (size(t), many(t)):
        as_small(
            student,
            t,
            "zb_h1_rows",
            "1F1B",
            sizes,
            "The forwards of ZB-H1 are those of 1F1B: only the weight parts move.",
        )


@check("zb_h1", points=1)
def check_few_open(student, t):
    "Rank r leaves at most r weight parts open"
    ranks = t.integer(3, 5)
    schedule, call = made_mostly(student, t, "zb_h1_rows", ranks, 4 * ranks)
    for rank, row in enumerate(schedule.rows):
        inputs, weights, most = 0, 0, 0
        for action in row:
            inputs += action.kind is I
            weights += action.kind is W
            most = max(most, inputs - weights)
        # r, and the one whose input part has just run
        message = (
            "{call}: after an input part rank {rank} has {most} weight parts to run. "
            "It needs only r of them for its drain, and each open one holds memory."
        )
        t.that(most <= rank + 1, message, call=call, rank=rank, most=most)


# -- 7 · bubble


def same_waiting(
    student,
    t,
    name: str,
    sizes: tuple[int, int, int],
    costs: tuple[float, float, float],
    lesson: str,
    mistakes: Mistakes | None = None,
) -> None:
    want = max(simulate(known(name, *sizes), shared(*costs, sizes[2])).bubble)
    call = (
        f'waiting("{name}", {", ".join(map(str, sizes))}, ' + ", ".join(f"{cost:.3g}" for cost in costs) + ")"
    )
    got = t.number(student.waiting(name, *sizes, *costs), call)
    wrong_if(
        t, got, want, {"{call}: " + words: wrong for words, wrong in (mistakes or {}).items()}, call=call
    )
    message = "{call} is {got:.4g}, in the simulation a rank waits {want:.4g}. " + lesson
    t.that(bool(abs(got - want) <= SLACK * (1 + want)), message, call=call, got=got, want=want)


@check("bubble", points=1)
def check_waiting_naive(student, t):
    "naive"
    for _ in range(3):
        same_waiting(
            student,
            t,
            "naive",
            (*size(t), 1),
            three(t),
            "While one rank computes, the other p - 1 wait; this happens for every micro-batch.",
        )


@check("bubble", points=1)
def check_waiting_one_stage(student, t):
    "AFAB and 1F1B"
    for name in ("AFAB", "1F1B"):
        same_waiting(
            student,
            t,
            name,
            (*size(t), 1),
            three(t),
            "The last rank waits for p - 1 forwards, the first for p - 1 backwards.",
        )


@check("bubble", points=1)
def check_waiting_interleaved(student, t):
    "Interleaved 1F1B"
    lesson = "Filling takes p - 1 forwards of one stage, and a stage has 1/v of the layers of a rank."
    for per_rank in (2, 3):
        same_waiting(student, t, "interleaved", (*groups(t), per_rank), three(t), lesson)


@check("bubble", points=2)
def check_waiting_zb_h1(student, t):
    "ZB-H1, when the three parts have different costs"
    lesson = "In the drain, each rank after the first runs one weight part while it waits for an input part."
    for _ in range(3):
        (ranks, micro_batches), (forward, inputs, weights) = size(t), three(t)
        mistakes = {
            "this is right only if F = I = W. What is left of a forward and an input part after a weight "
            "part has filled some of that time?": (ranks - 1) * forward,
            "this is the bubble of 1F1B: no weight part fills it": (ranks - 1) * (forward + inputs + weights),
            "this is the bubble of ZB-H2, which fills two weight parts": (ranks - 1)
            * (forward + inputs - 2 * weights),
        }
        same_waiting(
            student, t, "ZB-H1", (ranks, micro_batches, 1), (forward, inputs, weights), lesson, mistakes
        )


# -- 9 · the rule of the scheduler


def started(student, t, case: StartCase, ended: dict[str, float]):
    kind, stage, i = case.cell
    return student.earliest_start(kind, stage, i, ended, case.free, case.placement, case.send)


@check("start", points=2)
def check_inputs_are_there(student, t):
    "A cell waits until each of its inputs has been computed"
    cases = start_cases(t)
    some = any(started(student, t, case, case.ended) is not None for case in cases)
    message = (
        "not tested yet: your function returns None for every cell, also for those with all their inputs"
    )
    t.that(some, message)
    for case in cases:
        for missing in case.arrives:
            got = started(
                student, t, case, {cell: end for cell, end in case.ended.items() if cell != missing}
            )
            t.that(
                got is None,
                "{cell} needs {missing}, which has not run, but your function returns {got}: return None "
                "while an input is missing",
                cell=case.name,
                missing=missing,
                got=round(got, 2) if type(got) is float else got,
            )


STARTS = "{cell} starts at {value:.3g} in your function"
WHILE_BUSY = STARTS + ", while its rank is still busy"
SEND_ADDED = STARTS + ": `send` is added to an input from the same rank"
SEND_MISSING = STARTS + ", before its input has arrived: `send` is missing"


@check("start", points=2)
def check_start_times(student, t):
    "It starts when its rank is free and the last input has arrived"
    for case in start_cases(t):
        got = started(student, t, case, case.ended)
        message = (
            "{cell} has all its inputs, but your function returns None. The first stage has no stage before "
            "it, the last none after it"
        )
        t.that(got is not None, message, cell=case.name)
        got = t.number(got, f"the start of {case.name}")
        own, there = case.free[case.placement[case.cell[1]]], list(case.arrives.values())
        ended = [case.ended.get(cell) for cell in case.arrives]
        late = [end + case.send for end in ended]
        mistakes = {
            WHILE_BUSY: max([0.0, *there]),
            SEND_ADDED: max([own, *late]),
            SEND_MISSING: max([own, *ended]),
        }
        wrong_if(t, got, case.start, mistakes, cell=case.name, value=got)
        message = (
            "{cell} starts at {got:.4g} in your function, at {want:.4g} in the simulation: the latest of "
            "the time at which its rank is free and the arrivals of its inputs"
        )
        t.that(near(got, case.start), message, cell=case.name, got=got, want=case.start)


# -- 10 · contest


def entered(student, t, case: dict) -> Simulation:
    """Simulate the student's table for ``case``: complete, equal numbers of stages a rank, under the cap."""
    ranks, micro_batches, cap = case["ranks"], case["micro_batches"], case["cap"]
    call = f"contest_rows({ranks}, {micro_batches}, {cap:g}, ...)"
    rows = student.contest_rows(ranks, micro_batches, cap, case["costs"])
    owner = {
        action.stage: rank
        for rank, row in enumerate(read_rows(t, rows, ranks, call))
        for action in row
        if action.kind is F
    }
    stages_of = Counter(owner.values())
    equal = (
        sorted(owner) == list(range(len(owner)))
        and len(stages_of) == ranks
        and len(set(stages_of.values())) == 1
    )
    t.that(
        equal, "{call}: every rank needs the same number of stages, numbered from 0 without gaps", call=call
    )
    schedule = read_table(t, rows, [owner[stage] for stage in range(len(owner))], micro_batches, call)
    whole = any(action.kind is B for row in schedule.rows for action in row)
    complete(t, schedule, call, "FB" if whole else "FIW")
    holds_no_more(
        t, schedule, [cap] * ranks, call, "That is the cap; open weight parts count half.", FOR_WEIGHTS
    )
    # the cost of a message is fixed; that of computing is divided among the stages
    per_rank = schedule.stages // ranks
    costs = {name: cost if name == "send" else cost / per_rank for name, cost in case["costs"].items()}
    return carried_out(t, schedule, Costs(**costs), call)


@check("contest", points=2)
def check_under_the_cap(student, t):
    "The table runs under every cap from one micro-batch up"
    for cap in (1, 1.5, t.integer(2, 6)):
        entered(student, t, contest_case(t, *size(t), cap))


@check("contest", points=1)
def check_few_in_the_contest(student, t):
    "Fewer micro-batches than ranks, cap p: no slower than 1F1B"
    for ranks in (t.integer(4, 6), t.integer(4, 6)):
        case = contest_case(t, ranks, t.integer(2, ranks - 1), ranks)
        run, plain = (
            entered(student, t, case),
            simulate(known("1F1B", ranks, case["micro_batches"]), Costs(**case["costs"])),
        )
        t.that(
            bool(run.bubble_ratio <= plain.bubble_ratio + SLACK),
            "{ranks} ranks, {micro_batches} micro-batches, cap {ranks}: your bubble is {got:.3f} of the "
            "ideal time, that of 1F1B {want:.3f}. 1F1B fits this cap: your table must not be worse.",
            ranks=ranks,
            micro_batches=case["micro_batches"],
            got=run.bubble_ratio,
            want=plain.bubble_ratio,
        )


def reached(t, run: Simulation, case: dict, target: float, lesson: str) -> None:
    """Check that the bubble is at most the target."""
    t.that(
        bool(run.bubble_ratio <= target + SLACK),
        "{ranks} ranks, {micro_batches} micro-batches, cap {cap}: your bubble is {got:.3f} of the ideal "
        "time, the target {want:.3f}. " + lesson,
        ranks=case["ranks"],
        micro_batches=case["micro_batches"],
        cap=case["cap"],
        got=run.bubble_ratio,
        want=target,
    )


@check("contest", points=1)
def check_split_backward(student, t):
    "With a cap of p: at least as good as ZB-H1"
    for ranks in (3, t.integer(4, 5)):
        case = contest_case(t, ranks, 2 * ranks + t.integer(0, 4), ranks)
        best = simulate(known("ZB-H1", ranks, case["micro_batches"]), Costs(**case["costs"]))
        lesson = "ZB-H1 fits a cap of p: split the backward and delay weight parts."
        reached(t, entered(student, t, case), case, best.bubble_ratio, lesson)


@check("contest", points=2)
def check_tight_cap(student, t):
    "With a cap of p - 1: half the bubble of 1F1B with a shorter warm-up"
    for ranks in (4, t.integer(5, 6)):
        case = contest_case(t, ranks, 3 * ranks + t.integer(0, 3), ranks - 1)
        plain = simulate(short_1f1b(ranks, case["micro_batches"], case["cap"]), Costs(**case["costs"]))
        lesson = (
            "A tight cap blocks forwards, not weight parts: a rank that may not begin a forward can run a "
            "weight part, which also frees memory."
        )
        reached(t, entered(student, t, case), case, plain.bubble_ratio / 2, lesson)


@check("contest", points=2)
def check_spare_memory(student, t):
    "With a cap of 2p: a quarter less bubble than ZB-H2"
    for ranks in (3, t.integer(4, 5)):
        case = contest_case(t, ranks, 3 * ranks + t.integer(0, 3), 2 * ranks)
        best = simulate(known("ZB-H2", ranks, case["micro_batches"]), Costs(**case["costs"]))
        lesson = (
            "One stage per rank cannot fill the pipeline faster. Two half stages per rank can: place them "
            "in a V, or in a loop."
        )
        reached(t, entered(student, t, case), case, 0.75 * best.bubble_ratio, lesson)
