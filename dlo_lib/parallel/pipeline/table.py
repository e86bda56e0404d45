"""A pipeline schedule is a table: for each rank, the actions it carries out, in order.

The drawing, the validity check, the count of memory and the runtime all read this one table. A cell is written as in PyTorch's schedule
files: ``2F5`` is the forward of stage 2 on micro-batch 5, ``2B5`` its whole backward, or in two parts ``2I5`` (gradient of the input, which
the previous stage waits for) and ``2W5`` (gradient of the weights, which nobody waits for). ``2SEND_F5`` sends the output of that forward
to stage 3, ``3RECV_F5`` receives it there; ``SEND_B`` and ``RECV_B`` do the same for gradients, downwards.

A table says nothing of time: when an action happens follows from what it waits for (``simulate``).
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlo_lib.errors import UserError


class ActionKind(enum.Enum):
    """What a rank does in a cell; the value is PyTorch's letter for it."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741  the field's letters
COMPUTE = frozenset({F, B, I, W})
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})
_CELL = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_OF_OTHERS = re.compile(r"\s*|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")  # idle time, and what PyTorch adds for FSDP within a pipeline


class Action(NamedTuple):
    """One cell: what is done, for which stage and which micro-batch, both from 0."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written ``text``, such as ``2F5``.

        Raises:
            UserError: it is none.
        """
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise UserError(f'"{text}" is no action of a pipeline: write stage, kind and micro-batch, such as 2F5, 0B1 or 1SEND_F0')
        return cls(ActionKind(match[2]), int(match[1]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """A table of actions.

    Args:
        name: how drawings call it.
        placement: the rank of each stage, in the order of the stages; a rank may have several.
        micro_batches: how many a step has.
        rows: for each rank, its actions in order.
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
        """The stages on ``rank``, in their order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def compute(self) -> Schedule:
        """The same table without sends and receives."""
        rows = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in self.rows)
        return Schedule(self.name, self.placement, self.micro_batches, rows)

    @property
    def has_communication(self) -> bool:
        return any(action.kind not in COMPUTE for row in self.rows for action in row)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind is W for row in self.rows for action in row)

    def csv(self) -> str:
        """The table as PyTorch's schedules read it: a line for each rank, a cell for each action."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[str(action) for action in row] for row in self.rows])
        return text.getvalue()


def read_csv(text: str, placement: Sequence[int] | None = None, name: str = "from a file") -> Schedule:
    """The schedule in ``text``, a line for each rank; empty cells and what only concerns FSDP are left out.

    Args:
        placement: the rank of each stage; by default each stage lies on the rank whose line computes its forwards.

    Raises:
        UserError: a cell is no action, or no forward says where a stage lies.
    """
    rows = tuple(tuple(Action.parse(cell) for cell in line if not _OF_OTHERS.fullmatch(cell)) for line in csv.reader(io.StringIO(text)))
    micro_batches = 1 + max((action.micro_batch for row in rows for action in row), default=-1)
    return Schedule(name, tuple(placement) if placement is not None else _owners(rows), micro_batches, rows)


def _owners(rows: Iterable[Sequence[Action]]) -> tuple[int, ...]:
    owner = {action.stage: rank for rank, row in enumerate(rows) for action in row if action.kind is F}
    missing = [stage for stage in range(1 + max(owner, default=-1)) if stage not in owner]
    if missing or not owner:
        raise UserError(f"no rank has a forward of stage {missing[0] if missing else 0}: give the placement, or complete the table")
    return tuple(owner[stage] for stage in range(len(owner)))


def in_a_loop(ranks: int, per_rank: int = 1) -> tuple[int, ...]:
    """Stage s lies on rank s mod ``ranks``: with several a rank, the micro-batches go round the ranks."""
    return tuple(stage % ranks for stage in range(ranks * per_rank))


def in_a_v(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and up again: rank 0 has the first and the last, so it knows the loss."""
    return (*range(ranks), *reversed(range(ranks)))


def with_communication(schedule: Schedule) -> Schedule:
    """The table with its sends and receives written out, for stages whose neighbour lies on another rank.

    A send follows what made its data. Between two ranks messages arrive in the order in which they were sent, so a receive comes just
    before the first action that needs it or anything sent after it.
    """
    schedule = schedule.compute()
    sent: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if (receive := _receive_of(action, schedule)) is not None:
                sent.setdefault((rank, schedule.placement[receive.stage]), []).append(receive)
    place_in_queue = {receive: (channel, place) for channel, queue in sent.items() for place, receive in enumerate(queue)}
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
    """The receive on another rank that takes what ``action`` makes, if there is one."""
    if action.kind is W:
        return None
    forward = action.kind is F
    stage = action.stage + (1 if forward else -1)
    if not 0 <= stage < schedule.stages or schedule.placement[stage] == schedule.placement[action.stage]:
        return None
    return Action(ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD, stage, action.micro_batch)
