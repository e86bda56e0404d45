"""Read, complete and simulate the tables of pipeline schedules that students return, without the student's
code.

A table is rows of cells such as ``2F5``. The rows show which actions are missing and what each rank holds. A
simulation of the rows (:mod:`dlo_lib.parallel.pipeline.simulate`) shows deadlocks and times. The functions
take the trial ``t`` of a check, report the first wrong cell, and return what they have read. Cost: linear in
the cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.trial import Trial
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import COMPUTE, Action, ActionKind, B, F, I, Schedule, W

MOST_CELLS = 20_000
LONGEST_CELL = 40  # characters
SLACK = 1e-6
WORTH_TIMING = 0.6  # least share of the cells of a table that is timed; all forwards are half of them

Rows = tuple[tuple[Action, ...], ...]

_LESSONS = {
    F: "Every micro-batch goes through every stage.",
    B: "Without its backward the micro-batch is missing from the gradient: "
    "the pipeline has to be flushed before the optimiser's step.",
    I: "The stage before waits for this gradient.",
    W: "Without its weight part the micro-batch is missing from the gradient.",
}


def read_rows(t: Trial, rows: Any, ranks: int, call: str, kinds: Collection[ActionKind] = COMPUTE) -> Rows:
    """Read the rows as actions: ``ranks`` lists of cells of these ``kinds``. ``call`` names the source in
    messages.
    """
    good = type(rows) in (list, tuple) and len(rows) == ranks
    t.that(
        good,
        "{call} should be {ranks} lists of cells, one for each rank, not {rows}",
        call=call,
        ranks=ranks,
        rows=rows,
    )
    for rank, row in enumerate(rows):
        t.that(
            type(row) in (list, tuple),
            "{call}, rank {rank}: a row is a list of cells, not {row}",
            call=call,
            rank=rank,
            row=row,
        )
    t.that(
        sum(map(len, rows)) <= MOST_CELLS,
        "{call} has more cells than any of these schedules needs",
        call=call,
    )
    return tuple(
        tuple(_action(t, cell, f"{call}, rank {rank}, cell {place}", kinds) for place, cell in enumerate(row))
        for rank, row in enumerate(rows)
    )


def read_table(
    t: Trial,
    rows: Any,
    placement: Sequence[int],
    micro_batches: int,
    call: str,
    kinds: Collection[ActionKind] = COMPUTE,
) -> Schedule:
    """Read the rows as a schedule.

    Each cell has an existing stage and micro-batch, on the rank that ``placement`` gives the stage.
    """
    made = read_rows(t, rows, 1 + max(placement), call, kinds)
    for rank, row in enumerate(made):
        for position, action in enumerate(row):
            where = f"{call}, rank {rank}, cell {position} ({action})"
            exists = action.stage < len(placement) and action.micro_batch < micro_batches
            t.that(
                exists,
                "{where}: there are {stages} stages and {micro_batches} micro-batches, both counted from 0",
                where=where, stages=len(placement), micro_batches=micro_batches
            )  # fmt: skip
            owner = placement[action.stage]
            t.that(
                owner == rank,
                "{where}: stage {stage} lies on rank {owner}, not here",
                where=where,
                stage=action.stage,
                owner=owner,
            )
    return Schedule(call, tuple(placement), micro_batches, made)


def complete(t: Trial, schedule: Schedule, call: str, kinds: str) -> None:
    """Check that each forward and each backward (``kinds`` "FB", or "FIW" in parts) occurs exactly once."""
    found = Counter(action for row in schedule.rows for action in row)
    for action, times in found.items():
        t.that(
            times == 1,
            "{call}: {cell} is there {times} times; every action is done once",
            call=call,
            cell=str(action),
            times=times,
        )
        t.that(
            action.kind.value in kinds,
            "{call}: {cell} has a kind that this schedule does not use: it is made of {kinds}",
            call=call, cell=str(action), kinds=", ".join(kinds)
        )  # fmt: skip
    for kind in map(ActionKind, kinds):
        wanted = (
            Action(kind, stage, each)
            for stage in range(schedule.stages)
            for each in range(schedule.micro_batches)
        )
        lacking = next((action for action in wanted if action not in found), None)
        rank = schedule.placement[lacking.stage] if lacking else 0
        t.that(
            lacking is None,
            "{call}: {cell} is missing on rank {rank}. " + _LESSONS[kind],
            call=call,
            cell=str(lacking),
            rank=rank,
        )


def mostly_there(t: Trial, schedule: Schedule, call: str, kinds: str) -> None:
    """Check that most of the cells exist; a nearly empty table would be fast and hold little.

    :func:`complete` requires all cells.
    """
    found = len({action for row in schedule.rows for action in row if action.kind.value in kinds})
    wanted = len(kinds) * schedule.stages * schedule.micro_batches
    t.that(
        found >= WORTH_TIMING * wanted,
        "{call} has {found} of its {wanted} cells: complete it first",
        call=call,
        found=found,
        wanted=wanted,
    )


def carried_out(t: Trial, schedule: Schedule, costs: Costs, call: str) -> Simulation:
    """Simulate the table.

    Raises:
        Wrong: its ranks wait for each other forever; the message names the cells.
    """
    try:
        run = simulate(schedule, costs)
    except UserError as error:
        lesson = tr("A rank does its row from left to right and waits at each cell for what the cell needs.")
        raise Wrong(
            tr("{call} cannot be carried out. {why}. {lesson}", call=call, why=str(error), lesson=lesson),
            lesson,
        ) from None
    t.that(run.makespan > 0, "{call} takes no time at all", call=call)
    return run


def no_slower(t: Trial, run: Simulation, best: Simulation, call: str, lesson: str) -> None:
    """Check that ``run`` ends no later than ``best``; the message names the longest wait inside a row."""
    waits = [(after - before, rank, place + 1) for rank, row in enumerate(run.spans)
             for place, ((_, before), (after, _)) in enumerate(pairwise(row))]  # fmt: skip
    gap, rank, place = max(waits, key=lambda wait: wait[0], default=(0.0, 0, 0))
    cell = str(run.schedule.rows[rank][place]) if waits else ""
    t.that(
        run.makespan <= best.makespan * (1 + SLACK),
        "{call} takes {got:.4g}, and {want:.4g} is possible: "
        "rank {rank} waits {gap:.3g} before cell {place} ({cell}). " + lesson,
        call=call, got=run.makespan, want=best.makespan, rank=rank, gap=gap, place=place, cell=cell,
    )  # fmt: skip


def most_held(schedule: Schedule, for_weights: float = 0.0) -> list[float]:
    """Return the most that each rank holds, in activations of one micro-batch on all its layers, read from
    its row.

    A micro-batch counts 1 from its forward, ``for_weights`` after the input part, and 0 after both parts. A
    stage that is one of v of its rank counts 1/v of it.
    """
    change = {F: 1.0, B: -1.0, I: for_weights - 1.0, W: -for_weights}
    most = []
    for row in schedule.rows:
        now, peak = 0.0, 0.0
        for action in row:
            now += change[action.kind]
            peak = max(peak, now)
        most.append(peak * schedule.ranks / schedule.stages)
    return most


def holds_no_more(
    t: Trial, schedule: Schedule, most: Sequence[float], call: str, lesson: str, for_weights: float = 0.0
) -> None:
    """Check that no rank holds more than its entry of ``most``."""
    for rank, (got, want) in enumerate(zip(most_held(schedule, for_weights), most)):
        t.that(
            got <= want + SLACK,
            "{call}: rank {rank} holds up to {got:g} micro-batches, {want:g} is the most allowed. " + lesson,
            call=call, rank=rank, got=got, want=float(want),
        )  # fmt: skip


def _action(t: Trial, cell: Any, where: str, kinds: Collection[ActionKind]) -> Action:
    read = None
    if type(cell) is str and len(cell) <= LONGEST_CELL:
        try:
            read = Action.parse(cell)
        except UserError:
            read = None  # reported below with its position
    known = ", ".join(kind.value for kind in ActionKind if kind in kinds)
    t.that(
        read is not None and read.kind in kinds,
        "{where} is {cell}: write stage, kind ({kinds}) and micro-batch, such as 2F5",
        where=where, cell=cell, kinds=known
    )  # fmt: skip
    assert read is not None
    return read
