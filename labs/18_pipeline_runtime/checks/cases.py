"""The tables, models and batches that the checks draw and pass to ranks, and a simulation of blocking
messages."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Nudge, Run
from dlo_lib.parallel.pipeline.schedules import afab, one_f_one_b
from dlo_lib.parallel.pipeline.table import Action, ActionKind, B, F

from .scenarios import asynchronous, one_step, side_by_side, whole_rank
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
    return [rows_of(make, ranks, t.integer(1, 6)) for make in (afab, one_f_one_b) for ranks in (2, 3, 4)] + [
        rows_of(one_f_one_b, 1, 3)
    ]


def any_table(t, ranks: int, micro_batches: int) -> Rows:
    """Draw a table that can run and follows no rule: each time, a random rank runs a possible action."""
    rows: Rows = [[] for _ in range(ranks)]
    forwards, backwards = [0] * ranks, [0] * ranks
    while True:
        able = [
            (rank, "F")
            for rank in range(ranks)
            if forwards[rank] < (forwards[rank - 1] if rank else micro_batches)
        ]
        able += [
            (rank, "B")
            for rank in range(ranks)
            if backwards[rank] < (backwards[rank + 1] if rank < ranks - 1 else forwards[rank])
        ]
        if not able:
            return rows
        rank, kind = t.choice(able)
        count = forwards if kind == "F" else backwards
        rows[rank].append(f"{rank}{kind}{count[rank]}")
        count[rank] += 1


def messages_of(ranks: int, micro_batches: int, rank: int) -> set[Action]:
    """Return the messages that ``rank`` sends and receives."""
    there = {
        ActionKind.SEND_FORWARD: rank < ranks - 1,
        ActionKind.RECEIVE_FORWARD: rank > 0,
        ActionKind.SEND_BACKWARD: rank > 0,
        ActionKind.RECEIVE_BACKWARD: rank < ranks - 1,
    }
    return {Action(kind, rank, i) for kind in there if there[kind] for i in range(micro_batches)}


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
    lines = []
    for rank, (cell, *_) in left.items():
        at = rows[rank].index(cell)
        around = (
            [str(each) for each in rows[rank][max(0, at - 3) : at]],
            [str(each) for each in rows[rank][at + 1 : at + 3]],
        )
        lines.append(
            " ".join([f"rank {rank}:", *(["..."] if at > 3 else []), *around[0], f"[{cell}]", *around[1]])
        )
    for cell, *later in left.values():
        own = cell._replace(kind=ActionKind.SEND_FORWARD)
        if cell.kind is ActionKind.RECEIVE_BACKWARD and own in later:
            why = f"{cell} waits for the gradient of an output sent only later, in {own}"
            break
    else:
        why = "Two neighbours must have their messages in the same order"
    return [*lines, why]


# -- models and batches


def stage_case(t, order: list[tuple[str, int]]) -> dict:
    """Draw two stages, and the micro-batches of ``order``."""
    widths = [t.integer(3, 7) for _ in range(3)]
    sizes = [t.integer(1, 5) for _ in range(1 + max(i for _, i in order))]
    return {
        "weights": [t.normal(out, size, dtype=torch.float64) for size, out in itertools.pairwise(widths)],
        "inputs": [t.normal(size, widths[0], dtype=torch.float64) for size in sizes],
        "grads": [t.normal(size, widths[-1], dtype=torch.float64) for size in sizes],
        "order": order,
    }


def model_of(t, stages: int) -> Stages:
    """Draw weights and biases of stages, with a different width at each cut."""
    widths = [t.integer(3, 8) for _ in range(stages + 1)]
    return [
        [(t.normal(out, size, dtype=torch.float64), t.normal(out, dtype=torch.float64))]
        for size, out in itertools.pairwise(widths)
    ]


def samples_of(t, weights: Stages, sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Draw inputs and targets of micro-batches."""
    first, last = weights[0][0][0], weights[-1][-1][0]
    return [t.normal(size, first.shape[1], dtype=first.dtype) for size in sizes], [
        t.integers(0, last.shape[0] - 1, size) for size in sizes
    ]


def of_a_rank(rows: Rows, weights: Stages, inputs: list[Tensor], targets: list[Tensor], place: int) -> dict:
    """Return the data of a rank: its stage; on the first rank the inputs, on the last the targets."""
    return {
        "rows": rows,
        "weights": weights[place],
        "inputs": inputs if place == 0 else None,
        "targets": targets if place == len(weights) - 1 else None,
        "shapes": [(len(x), weights[place][0][0].shape[1]) for x in inputs],
    }


def step(
    student, make, weights: Stages, inputs: list[Tensor], targets: list[Tensor], nudge: Nudge | None = None
) -> Run:
    """Run a step with one rank for each stage."""
    rows, total = rows_of(make, len(weights), len(inputs)), sum(map(len, targets))
    given = [
        {**of_a_rank(rows, weights, inputs, targets, rank), "total": total} for rank in range(len(weights))
    ]
    return student.ranks(one_step, given, nudge)


def together(
    student, weights: Stages, inputs: list[Tensor], targets: list[Tensor], every_target: list[Tensor]
) -> Run:
    """Run pipeline_step with one rank for each stage; every rank gets the inputs and targets."""
    rows, same = (
        rows_of(one_f_one_b, len(weights), len(inputs)),
        {"inputs": inputs, "targets": targets, "every_target": every_target},
    )
    return student.ranks(
        whole_rank,
        [{**of_a_rank(rows, weights, inputs, targets, rank), **same} for rank in range(len(weights))],
    )


def in_the_grid(rank: int, stages: int) -> list[int | None]:
    """Return the neighbours of a rank in its pipeline."""
    return [rank - 1 if rank % stages > 0 else None, rank + 1 if rank % stages < stages - 1 else None]


def hybrid(
    student,
    weights: Stages,
    inputs: list[Tensor],
    targets: list[Tensor],
    replicas: int,
    steps: int = 1,
    own: bool = False,
) -> Run:
    """Run ``steps`` equal steps of ``replicas`` pipelines, each with its share of the micro-batches.

    The messages go to the neighbours that hybrid_step passes if ``own``, otherwise to the right ones.
    """
    stages, each = len(weights), len(inputs) // replicas
    rows, total = rows_of(one_f_one_b, stages, each), sum(map(len, targets))
    given = []
    for rank in range(replicas * stages):
        mine = slice(rank // stages * each, (rank // stages + 1) * each)
        given.append(
            {
                **of_a_rank(rows, weights, inputs[mine], targets[mine], rank % stages),
                "total": total,
                "stages": stages,
                "steps": steps,
                "neighbours": None if own else in_the_grid(rank, stages),
            }
        )
    return student.ranks(side_by_side, given)


def asynchronously(student, weights: Stages, inputs: list[Tensor], targets: list[Tensor], lr: float) -> Run:
    """Run 1F1B without flush over these batches."""
    ranks = len(weights)
    rows = rows_of(one_f_one_b, ranks, len(inputs))
    return student.ranks(
        asynchronous, [{**of_a_rank(rows, weights, inputs, targets, rank), "lr": lr} for rank in range(ranks)]
    )


def split_case(t, micro_batches: int) -> dict:
    """Draw a linear layer, and micro-batches of (batch, seq, features)."""
    inside, outside, seq = t.integer(3, 7), t.integer(3, 7), t.integer(2, 4)
    sizes = [t.integer(1, 3) for _ in range(micro_batches)]
    xs, grads = (
        [t.normal(size, seq, width, dtype=torch.float64) for size in sizes] for width in (inside, outside)
    )
    weight, bias = t.normal(outside, inside, dtype=torch.float64), t.normal(outside, dtype=torch.float64)
    return {"xs": xs, "grads": grads, "weight": weight, "bias": bias}


def delayed_case(t, delays: list[int], steps: int) -> dict:
    """Draw a training of small weights, with these delays."""
    weights, goals = (
        [t.normal(3, dtype=torch.float64) for _ in range(count)] for count in (len(delays), steps)
    )
    return {"weights": weights, "goals": goals, "lr": t.uniform(0.1, 0.3), "delays": delays, "steps": steps}
