"""The tables, models and batches that the checks draw and pass to ranks, and a simulation of blocking
messages."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from dlo_lib.grading.checks.contract import Nudge, Run
from dlo_lib.labkit.compare import double
from dlo_lib.parallel.pipeline.schedules import afab, one_f_one_b
from dlo_lib.parallel.pipeline.table import Action, ActionKind, B, F

from .scenarios import asynchronous, one_step, side_by_side
from .twins import Stages

Rows = list[list[str]]
SENDS = {
    ActionKind.SEND_FORWARD: (1, ActionKind.RECEIVE_FORWARD),
    ActionKind.SEND_BACKWARD: (-1, ActionKind.RECEIVE_BACKWARD),
}

# -- tables


def table_cases(t) -> list[tuple[int, int]]:
    """Draw ranks and micro-batches, also few micro-batches, and a single rank."""
    return [(2, t.integer(3, 6)), (3, t.integer(4, 9)), (4, t.integer(5, 12)), (4, 2), (1, 3)]


def rows_of(make, ranks: int, micro_batches: int) -> Rows:
    """Return the table of the library in the notation of the notebook."""
    return [[str(action) for action in row] for row in make(ranks, micro_batches).rows]


def order_cases(t) -> list[Rows]:
    """Draw tables without messages."""
    drawn = [rows_of(make, ranks, t.integer(1, 6)) for make in (afab, one_f_one_b) for ranks in (2, 3, 4)]
    return [*drawn, rows_of(one_f_one_b, 1, 3)]


def any_table(t, ranks: int, micro_batches: int) -> Rows:
    """Draw a table that can run and follows no rule: each time, a random rank runs a possible action."""
    rows: Rows = [[] for _ in range(ranks)]
    while True:
        forwards, backwards = ([sum(kind in cell for cell in row) for row in rows] for kind in "FB")
        forwards, backwards = [micro_batches, *forwards], [*backwards, forwards[-1]]
        able = [
            (rank, "F", forwards[rank + 1]) for rank in range(ranks) if forwards[rank + 1] < forwards[rank]
        ]
        able += [
            (rank, "B", backwards[rank]) for rank in range(ranks) if backwards[rank] < backwards[rank + 1]
        ]
        if not able:
            return rows
        rank, kind, number = t.choice(able)
        rows[rank].append(f"{rank}{kind}{number}")


def messages_of(ranks: int, micro_batches: int, rank: int) -> set[Action]:
    """Return the messages that ``rank`` sends and receives."""
    with_next = (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD)
    with_last = (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD)
    kinds = with_next * (rank < ranks - 1) + with_last * (rank > 0)
    return {Action(kind, rank, i) for kind in kinds for i in range(micro_batches)}


def stuck_at(rows: tuple[tuple[Action, ...], ...]) -> dict[int, list[Action]]:
    """Run sends and receives that wait for each other; return the messages that are left on each rank that
    waits forever."""
    left = [[action for action in reversed(row) if action.kind not in (F, B)] for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            if row and row[-1].kind in SENDS:
                way, receive = SENDS[row[-1].kind]
                other = left[rank + way] if 0 <= rank + way < len(left) else []
                if other and other[-1] == Action(receive, rank + way, row[-1].micro_batch):
                    row.pop()
                    other.pop()
                    moved = True
    return {rank: row[::-1] for rank, row in enumerate(left) if row}


def why_stuck(rows: tuple[tuple[Action, ...], ...], left: dict[int, list[Action]]) -> list[str]:
    """Return for each rank the cells around the one at which it waits, and at the end the cause."""
    lines, causes = [], []
    for rank, (cell, *later) in left.items():
        at = rows[rank].index(cell)
        before, after = rows[rank][max(0, at - 3) : at], rows[rank][at + 1 : at + 3]
        cells = [*["..."] * (at > 3), *map(str, before), f"[{cell}]", *map(str, after)]
        lines.append(" ".join([f"rank {rank}:", *cells]))
        own = cell._replace(kind=ActionKind.SEND_FORWARD)
        if cell.kind is ActionKind.RECEIVE_BACKWARD and own in later:
            causes.append(f"{cell} waits for the gradient of an output sent only later, in {own}")
    return [*lines, *(causes or ["Two neighbours must have their messages in the same order"])[:1]]


# -- models and batches


class Case(NamedTuple):
    """A model that is cut into stages, and the micro-batches of a step."""

    weights: Stages
    inputs: list[Tensor]
    targets: list[Tensor]

    def of_ranks(self, make=one_f_one_b, **others) -> list[dict]:
        """Return the data of each rank: its stage; on the first rank the inputs, on the last the targets."""
        rows, last = rows_of(make, len(self.weights), len(self.inputs)), len(self.weights) - 1
        return [
            {
                "rows": rows,
                "weights": stage,
                "inputs": self.inputs if rank == 0 else None,
                "targets": self.targets if rank == last else None,
                "shapes": [(len(x), stage[0][0].shape[1]) for x in self.inputs],
                **others,
            }
            for rank, stage in enumerate(self.weights)
        ]


def drawn(t, stages: int, sizes: list[int]) -> Case:
    """Draw weights and biases of stages, with a different width at each cut, and micro-batches of these
    sizes."""
    widths = [t.integer(3, 8) for _ in range(stages + 1)]
    weights = [[(double(t, out, size), double(t, out))] for size, out in itertools.pairwise(widths)]
    targets = [t.integers(0, widths[-1] - 1, size) for size in sizes]
    return Case(weights, [double(t, size, widths[0]) for size in sizes], targets)


def large(t, stages: int, width: int, size: int, micro_batches: int) -> Case:
    """Draw wide stages and micro-batches in float32, for a measurement of memory."""
    return Case(
        [[(t.normal(width, width) / width**0.5, t.normal(width))] for _ in range(stages)],
        [t.normal(size, width) for _ in range(micro_batches)],
        [t.integers(0, width - 1, size) for _ in range(micro_batches)],
    )


def step(student, make, case: Case, nudge: Nudge | None = None) -> Run:
    """Run a step with one rank for each stage."""
    return student.ranks(one_step, case.of_ranks(make, total=sum(map(len, case.targets))), nudge)


def in_the_grid(rank: int, stages: int) -> list[int | None]:
    """Return the neighbours of a rank in its pipeline."""
    return [rank - 1 if rank % stages > 0 else None, rank + 1 if rank % stages < stages - 1 else None]


def hybrid(student, case: Case, replicas: int, steps: int = 1, own: bool = False) -> Run:
    """Run ``steps`` equal steps of ``replicas`` pipelines, each with its share of the micro-batches.

    The messages go to the neighbours that hybrid_step passes if ``own``, otherwise to the right ones.
    """
    stages, each = len(case.weights), len(case.inputs) // replicas
    shares = [slice(first, first + each) for first in range(0, replicas * each, each)]
    fixed = {"total": sum(map(len, case.targets)), "stages": stages, "steps": steps}
    given: list[dict] = []
    for share in shares:
        given += Case(case.weights, case.inputs[share], case.targets[share]).of_ranks(**fixed)
    for rank, inputs in enumerate(given):
        inputs["neighbours"] = None if own else in_the_grid(rank, stages)
    return student.ranks(side_by_side, given)


def asynchronously(student, case: Case, lr: float) -> Run:
    """Run 1F1B without flush over these batches."""
    return student.ranks(asynchronous, case.of_ranks(lr=lr))
