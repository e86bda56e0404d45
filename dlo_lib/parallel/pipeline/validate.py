"""Whether a schedule can be carried out: every dependency kept, every micro-batch once through every stage, no dead-lock.

The table is carried out without a clock. Ranks with rows of fixed order and queues of fixed length between them come to the same end
whatever their speeds, so one order of events stands for all. A message takes a place in the queue from one rank to another from its making
until its use; a rank whose queue is full cannot go on, which is how a schedule that is fine on paper hangs on a machine.
"""

from __future__ import annotations

from collections import defaultdict, deque

from dlo_lib.errors import UserError
from dlo_lib.parallel.pipeline.table import COMPUTE, RECEIVES, SENDS, Action, ActionKind, B, F, I, Schedule, W

Channel = tuple[int, int]


def uses(action: Action, stages: int) -> tuple[Action, ...]:
    """The results that a compute action uses, each named by the forward, or the input gradient, that makes it."""
    kind, stage, micro_batch = action
    if kind is F:
        return (Action(F, stage - 1, micro_batch),) if stage else ()
    if kind is W:
        return (Action(I, stage, micro_batch),)
    forward = Action(F, stage, micro_batch)
    return (forward,) if stage == stages - 1 else (forward, Action(I, stage + 1, micro_batch))


def makes(action: Action) -> Action | None:
    """The result of a compute action that others use: a whole backward makes an input gradient too."""
    return None if action.kind is W else Action(I, *action[1:]) if action.kind is B else action


def validate(schedule: Schedule, queue: int | None = None) -> None:
    """Raise unless ``schedule`` can be carried out.

    Args:
        queue: how many messages fit between one rank and another; None for as many as there are.

    Raises:
        UserError: names the faulty cell and what is wrong with it.
    """
    if queue is not None and queue < 1:
        raise UserError(f"a queue of {queue} messages lets nothing through: use at least 1")
    _each_once(schedule)
    _Run(schedule, queue).carry_out()


def _each_once(schedule: Schedule) -> None:
    where: dict[Action, str] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            here = _cell(rank, position, action)
            if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.micro_batches):
                raise UserError(f"{here}: there are {schedule.stages} stages and {schedule.micro_batches} micro-batches, counted from 0")
            if schedule.placement[action.stage] != rank:
                raise UserError(f"{here}: stage {action.stage} lies on rank {schedule.placement[action.stage]}")
            if action in where:
                raise UserError(f"{here}: the same action is in {where[action]} already")
            where[action] = here
    for stage, owner in enumerate(schedule.placement):
        for micro_batch in range(schedule.micro_batches):
            forward, whole, inputs, weights = (Action(kind, stage, micro_batch) in where for kind in (F, B, I, W))
            name = f"rank {owner}: micro-batch {micro_batch} on stage {stage}"
            if not forward:
                raise UserError(f"{name} has no forward: add {Action(F, stage, micro_batch)}")
            if whole and (inputs or weights):
                raise UserError(f"{name} has a whole backward and a part of one: use B, or I and W")
            if not whole and not (inputs and weights):
                lacking = [str(Action(kind, stage, micro_batch)) for kind, there in ((I, inputs), (W, weights)) if not there]
                raise UserError(f"{name} has no backward: add {Action(B, stage, micro_batch)}, or {' and '.join(lacking)}")


class _Run:
    """The table carried out, each rank as far as it comes."""

    def __init__(self, schedule: Schedule, queue: int | None) -> None:
        self._schedule, self._queue = schedule, queue
        self._explicit = schedule.has_communication
        self._position = [0] * schedule.ranks
        self._here: list[set[Action]] = [set() for _ in schedule.rows]  # results that a rank has, made or received
        self._queues: dict[Channel, deque[Action]] = defaultdict(deque)

    def carry_out(self) -> None:
        rows, position = self._schedule.rows, self._position
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row) and self._step(rank, row[position[rank]]):
                    position[rank] += 1
                    moved = True
        stuck = [rank for rank, row in enumerate(rows) if position[rank] < len(row)]
        if stuck:
            raise UserError(self._why(stuck))
        left = [(channel, messages[0]) for channel, messages in self._queues.items() if messages]
        if left:
            (sender, receiver), message = left[0]
            raise UserError(f"{_message(message)} is sent by rank {sender} and never received by rank {receiver}: add the receive")

    def _step(self, rank: int, action: Action) -> bool:
        """Carry ``action`` out if that is possible now."""
        if self._lacks(rank, action) is not None or self._full(rank, action) is not None:
            return False
        here = self._here[rank]
        if action.kind in SENDS:
            self._queues[rank, self._receiver(action)].append(_carried(action))
        elif action.kind in RECEIVES:
            here.add(self._queues[self._sender(action), rank].popleft())
        else:
            if not self._explicit:
                for result in uses(action, self._schedule.stages):
                    if (owner := self._schedule.placement[result.stage]) != rank:
                        self._queues[owner, rank].remove(result)
            made = makes(action)
            if made is not None:
                here.add(made)
                user = self._user(made)
                if not self._explicit and user is not None and user != rank:
                    self._queues[rank, user].append(made)
        return True

    def _lacks(self, rank: int, action: Action) -> Action | None:
        """What ``action`` waits for, if it is not there."""
        if action.kind in SENDS:
            return None if _carried(action) in self._here[rank] else _carried(action)
        if action.kind in RECEIVES:
            messages = self._queues[self._sender(action), rank]
            if messages and messages[0] != _carried(action):
                raise UserError(
                    f"{_cell(rank, self._position[rank], action)}: the next message from rank {self._sender(action)} is "
                    f"{_message(messages[0])}: receive in the order of the sends"
                )
            return None if messages else _carried(action)
        for result in uses(action, self._schedule.stages):
            owner = self._schedule.placement[result.stage]
            there = self._here[rank] if self._explicit or owner == rank else self._queues[owner, rank]
            if result not in there:
                return result
        return None

    def _full(self, rank: int, action: Action) -> int | None:
        """The rank to which what ``action`` makes or sends has no room in the queue."""
        if self._queue is None or (self._explicit and action.kind not in SENDS):
            return None
        result = makes(action) if action.kind in COMPUTE else _carried(action)
        user = self._user(result) if result is not None else None
        if user is None or user == rank:
            return None
        return user if len(self._queues[rank, user]) >= self._queue else None

    def _user(self, result: Action) -> int | None:
        """The rank of the next stage on the way of ``result``."""
        stage = result.stage + (1 if result.kind is F else -1)
        return self._schedule.placement[stage] if 0 <= stage < self._schedule.stages else None

    def _receiver(self, send: Action) -> int:
        receiver = self._user(_carried(send))
        if receiver is None:
            raise UserError(f"{send}: no stage comes after stage {send.stage} on that way")
        return receiver

    def _sender(self, receive: Action) -> int:
        stage = _carried(receive).stage
        if not 0 <= stage < self._schedule.stages:
            raise UserError(f"{receive}: no stage comes before stage {receive.stage} on that way")
        return self._schedule.placement[stage]

    def _why(self, stuck: list[int]) -> str:
        """Follow who waits for whom from the first stuck rank until one comes twice."""
        chain, lines = [stuck[0]], []
        while chain[-1] not in chain[:-1]:
            rank = chain[-1]
            position = self._position[rank]
            action = self._schedule.rows[rank][position]
            lacking, full = self._lacks(rank, action), self._full(rank, action)
            if lacking is not None:
                other = self._schedule.placement[lacking.stage] if action.kind not in RECEIVES else self._sender(action)
                if other == rank or (self._explicit and action.kind in COMPUTE):
                    return f"{_cell(rank, position, action)} uses {_message(lacking)}, which is not there yet: put that before it"
                lines.append(f"{_cell(rank, position, action)} waits for {_message(lacking)} of rank {other}")
            else:
                assert full is not None  # it is stuck
                other = full
                lines.append(f"{_cell(rank, position, action)} waits for room in the queue to rank {other}, which holds {self._queue}")
            if self._position[other] == len(self._schedule.rows[other]):
                return f"{lines[-1]}, which has no such action left"
            chain.append(other)
        return "dead-lock: " + "; ".join(lines[chain.index(chain[-1]) :])


def _carried(message: Action) -> Action:
    """The result that a send or a receive carries."""
    kind, stage, micro_batch = message
    return {
        ActionKind.SEND_FORWARD: Action(F, stage, micro_batch),
        ActionKind.SEND_BACKWARD: Action(I, stage, micro_batch),
        ActionKind.RECEIVE_FORWARD: Action(F, stage - 1, micro_batch),
        ActionKind.RECEIVE_BACKWARD: Action(I, stage + 1, micro_batch),
    }[kind]


def _message(result: Action) -> str:
    what = "output" if result.kind is F else "input gradient"
    return f"the {what} of stage {result.stage} for micro-batch {result.micro_batch}"


def _cell(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, cell {position} ({action})"
