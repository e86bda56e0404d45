"""A pipeline schedule as a table that lists, for each rank, its actions in order.

The drawing, the validation, the memory model and the runtime read this table. The cells have the format of
PyTorch's schedule files: ``2F5`` is the forward of stage 2 on micro-batch 5, and ``2B5`` is its whole
backward. A split backward consists of ``2I5``, the gradient of the input, for which the previous stage waits,
and ``2W5``, the gradient of the weights, for which no stage waits. ``2SEND_F5`` sends the output of the
forward to stage 3, and ``3RECV_F5`` receives it there. ``SEND_B`` and ``RECV_B`` send and receive gradients,
to the previous stage.

A table contains no times. ``simulate`` derives them from the dependencies of the actions.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlo_lib.base.errors import UserError


class ScheduleKind(enum.Enum):
    """The schedules, with the names of the command line. ``schedules.make_schedule`` creates their tables."""

    NAIVE = "naive"
    AFAB = "afab"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"


class ActionKind(enum.Enum):
    """The kind of an action; the value is PyTorch's abbreviation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741  the letters of the literature
COMPUTE = frozenset({F, B, I, W})
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})
_CELL = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_COMBINED = re.compile(r"\((.*)\)OVERLAP_F_B")  # PyTorch's DualPipeV runs these actions one after the other
# Idle cells, and PyTorch's actions for FSDP
_IGNORED = re.compile(r"\s*|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Action(NamedTuple):
    """One cell: a kind, a stage and a micro-batch. Stages and micro-batches are counted from 0."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse an action such as ``2F5``.

        Raises:
            UserError: ``text`` is not an action.
        """
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise UserError(
                f'"{text}" is no action of a pipeline: '
                "write stage, kind and micro-batch, such as 2F5, 0B1 or 1SEND_F0",
            )
        return cls(ActionKind(match[2]), int(match[1]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """A table of actions.

    Args:
        name: the name in drawings and messages.
        placement: the rank of each stage. A rank may have several stages.
        micro_batches: the number of micro-batches in a step.
        rows: the actions of each rank, in order.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of ``rank`` in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def compute(self) -> Schedule:
        """Return the table without sends and receives."""
        rows = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in self.rows)
        return Schedule(self.name, self.placement, self.micro_batches, rows)

    @property
    def has_communication(self) -> bool:
        return any(action.kind not in COMPUTE for row in self.rows for action in row)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind is W for row in self.rows for action in row)

    def csv(self) -> str:
        """Return the table in the CSV format of PyTorch's schedules: a line for each rank, a cell for each
        action."""
        text = io.StringIO()
        rows = [[str(action) for action in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()


def read_csv(text: str, placement: Sequence[int] | None = None, name: str = "from a file") -> Schedule:
    """Return the schedule in ``text``, which has a line for each rank. Empty cells and the actions of FSDP
    are ignored. A combined cell of PyTorch, ``(0F5;1B3)OVERLAP_F_B``, is read as its actions in order.

    Args:
        placement: the rank of each stage; by default, the rank whose line contains the forwards of the stage.

    Raises:
        UserError: a cell is not an action, or a stage has no forward.
    """
    lines = csv.reader(io.StringIO(text))
    rows = tuple(
        tuple(
            Action.parse(part)
            for cell in line
            for part in _COMBINED.sub(r"\1", cell.strip()).split(";")
            if not _IGNORED.fullmatch(part)
        )
        for line in lines
    )
    micro_batches = 1 + max((action.micro_batch for row in rows for action in row), default=-1)
    return Schedule(name, tuple(placement) if placement is not None else _owners(rows), micro_batches, rows)


def _owners(rows: Iterable[Sequence[Action]]) -> tuple[int, ...]:
    owner = {action.stage: rank for rank, row in enumerate(rows) for action in row if action.kind is F}
    missing = [stage for stage in range(1 + max(owner, default=-1)) if stage not in owner]
    if missing or not owner:
        raise UserError(
            f"no rank has a forward of stage {missing[0] if missing else 0}: "
            "give the placement, or complete the table",
        )
    return tuple(owner[stage] for stage in range(len(owner)))


def in_a_loop(ranks: int, per_rank: int = 1) -> tuple[int, ...]:
    """Return the placement of stage s on rank s mod ``ranks``, with ``per_rank`` stages per rank."""
    return tuple(stage % ranks for stage in range(ranks * per_rank))


def in_a_v(ranks: int) -> tuple[int, ...]:
    """Return the placement of two stages per rank in a V. Rank 0 has the first and the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


def with_communication(schedule: Schedule) -> Schedule:
    """Return the table with sends and receives, for neighbouring stages on different ranks.

    A send follows the action that computes its data. Messages between two ranks arrive in the order in which
    they were sent. A receive therefore precedes the first action that needs this message or a later one.
    """
    schedule = schedule.compute()
    sent: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if (receive := _receive_of(action, schedule)) is not None:
                sent.setdefault((rank, schedule.placement[receive.stage]), []).append(receive)
    place_in_queue = {
        receive: (channel, place) for channel, queue in sent.items() for place, receive in enumerate(queue)
    }
    received = dict.fromkeys(sent, 0)
    rows = []
    for row in schedule.rows:
        cells: list[Action] = []
        for action in row:
            needed = _INPUT.get(action.kind)
            wanted = Action(needed, action.stage, action.micro_batch) if needed is not None else None
            if wanted in place_in_queue:
                channel, place = place_in_queue[wanted]
                cells += sent[channel][received[channel] : place + 1]
                received[channel] = max(received[channel], place + 1)
            cells.append(action)
            receive = _receive_of(action, schedule)
            if receive is not None:
                kind = ActionKind.SEND_FORWARD if action.kind is F else ActionKind.SEND_BACKWARD
                cells.append(Action(kind, action.stage, action.micro_batch))
        rows.append(tuple(cells))
    return Schedule(schedule.name, schedule.placement, schedule.micro_batches, tuple(rows))


_INPUT = {F: ActionKind.RECEIVE_FORWARD, B: ActionKind.RECEIVE_BACKWARD, I: ActionKind.RECEIVE_BACKWARD}


def _receive_of(action: Action, schedule: Schedule) -> Action | None:
    """Return the receive on another rank that takes the result of ``action``, or None."""
    if action.kind is W:
        return None
    forward = action.kind is F
    stage = action.stage + (1 if forward else -1)
    if not 0 <= stage < schedule.stages or schedule.placement[stage] == schedule.placement[action.stage]:
        return None
    return Action(
        ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD, stage, action.micro_batch
    )
