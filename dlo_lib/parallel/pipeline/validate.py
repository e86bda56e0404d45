"""Validates a schedule: every dependency is respected, every micro-batch passes once through every stage, and
there is no deadlock.

The table is executed without times. Because the order of each row and the lengths of the queues are fixed,
the result does not depend on the speed of the ranks, and one order of execution is sufficient. A message
occupies the queue between two ranks from its creation to its use. A rank with a full queue cannot continue,
which may deadlock a schedule whose dependencies are correct.
"""

from __future__ import annotations

from collections import defaultdict, deque

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.table import COMPUTE, RECEIVES, SENDS, Action, ActionKind, B, F, I, Schedule, W

Channel = tuple[int, int]


def uses(action: Action, stages: int) -> tuple[Action, ...]:
    """Return the results that a compute action uses. A result is named by the forward or input gradient that
    computes it."""
    kind, stage, micro_batch = action
    if kind is F:
        return (Action(F, stage - 1, micro_batch),) if stage else ()
    if kind is W:
        return (Action(I, stage, micro_batch),)
    forward = Action(F, stage, micro_batch)
    return (forward,) if stage == stages - 1 else (forward, Action(I, stage + 1, micro_batch))


def makes(action: Action) -> Action | None:
    """Return the result of a compute action that other actions use. A whole backward computes an input
    gradient."""
    return None if action.kind is W else Action(I, *action[1:]) if action.kind is B else action


def validate(schedule: Schedule, queue: int | None = None) -> None:
    """Raise an error unless ``schedule`` can be executed.

    Args:
        queue: the number of messages that a queue between two ranks can hold; None for no limit.

    Raises:
        UserError: the schedule cannot be executed. The message names the faulty cell and the cause.
    """
    if queue is not None and queue < 1:
        raise UserError(f"a queue of {queue} messages transfers nothing: use at least 1")
    _check_actions(schedule)
    _Executor(schedule, queue).run()


def _check_actions(schedule: Schedule) -> None:
    where: dict[Action, str] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            here = _cell(rank, position, action)
            if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.micro_batches):
                raise UserError(
                    f"{here}: there are {schedule.stages} stages and {schedule.micro_batches} micro-batches, "
                    "counted from 0",
                )
            if schedule.placement[action.stage] != rank:
                raise UserError(
                    f"{here}: stage {action.stage} lies on rank {schedule.placement[action.stage]}"
                )
            if action in where:
                raise UserError(f"{here}: the same action is in {where[action]} already")
            where[action] = here
    for stage, owner in enumerate(schedule.placement):
        for micro_batch in range(schedule.micro_batches):
            kinds = (F, B, I, W)
            forward, whole, inputs, weights = (Action(kind, stage, micro_batch) in where for kind in kinds)
            name = f"rank {owner}: micro-batch {micro_batch} on stage {stage}"
            if not forward:
                raise UserError(f"{name} has no forward: add {Action(F, stage, micro_batch)}")
            if whole and (inputs or weights):
                raise UserError(f"{name} has a whole backward and a part of one: use B, or I and W")
            if not whole and not (inputs and weights):
                present = ((I, inputs), (W, weights))
                lacking = [str(Action(kind, stage, micro_batch)) for kind, found in present if not found]
                raise UserError(
                    f"{name} has no backward: "
                    f"add {Action(B, stage, micro_batch)}, or {' and '.join(lacking)}",
                )


class _Executor:
    """Executes the table; each rank proceeds until it has to wait."""

    def __init__(self, schedule: Schedule, queue: int | None) -> None:
        self._schedule, self._queue = schedule, queue
        self._explicit = schedule.has_communication
        self._position = [0] * schedule.ranks
        # The computed and received results of each rank
        self._here: list[set[Action]] = [set() for _ in schedule.rows]
        self._queues: dict[Channel, deque[Action]] = defaultdict(deque)

    def run(self) -> None:
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
            raise UserError(
                f"{_message(message)} is sent by rank {sender} and never received by rank {receiver}: "
                "add the receive",
            )

    def _step(self, rank: int, action: Action) -> bool:
        """Execute ``action`` if its inputs are available and its queue is not full; return whether it was
        executed."""
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
        """Return the result for which ``action`` waits, or None."""
        if action.kind in SENDS:
            return None if _carried(action) in self._here[rank] else _carried(action)
        if action.kind in RECEIVES:
            messages = self._queues[self._sender(action), rank]
            if messages and messages[0] != _carried(action):
                cell, sender = _cell(rank, self._position[rank], action), self._sender(action)
                raise UserError(
                    f"{cell}: the next message from rank {sender} is {_message(messages[0])}: "
                    "receive in the order of the sends",
                )
            return None if messages else _carried(action)
        for result in uses(action, self._schedule.stages):
            owner = self._schedule.placement[result.stage]
            there = self._here[rank] if self._explicit or owner == rank else self._queues[owner, rank]
            if result not in there:
                return result
        return None

    def _full(self, rank: int, action: Action) -> int | None:
        """Return the rank whose incoming queue is full, so that ``action`` has to wait, or None."""
        if self._queue is None or (self._explicit and action.kind not in SENDS):
            return None
        result = makes(action) if action.kind in COMPUTE else _carried(action)
        user = self._user(result) if result is not None else None
        if user is None or user == rank:
            return None
        return user if len(self._queues[rank, user]) >= self._queue else None

    def _user(self, result: Action) -> int | None:
        """Return the rank that uses ``result``: of the next stage for an output, of the previous one for a
        gradient."""
        stage = result.stage + (1 if result.kind is F else -1)
        return self._schedule.placement[stage] if 0 <= stage < self._schedule.stages else None

    def _receiver(self, send: Action) -> int:
        receiver = self._user(_carried(send))
        if receiver is None:
            raise UserError(f"{send}: no stage comes after stage {send.stage} in this direction: remove it")
        return receiver

    def _sender(self, receive: Action) -> int:
        stage = _carried(receive).stage
        if not 0 <= stage < self._schedule.stages:
            raise UserError(
                f"{receive}: no stage comes before stage {receive.stage} in this direction: remove it"
            )
        return self._schedule.placement[stage]

    def _why(self, stuck: list[int]) -> str:
        """Return the message for a deadlock: follow the waiting ranks from the first one until a rank occurs
        twice."""
        chain, lines = [stuck[0]], []
        while chain[-1] not in chain[:-1]:
            rank = chain[-1]
            position = self._position[rank]
            action = self._schedule.rows[rank][position]
            lacking, full = self._lacks(rank, action), self._full(rank, action)
            if lacking is not None:
                if action.kind in RECEIVES:
                    other = self._sender(action)
                else:
                    other = self._schedule.placement[lacking.stage]
                cell = _cell(rank, position, action)
                if other == rank or (self._explicit and action.kind in COMPUTE):
                    return f"{cell} uses {_message(lacking)}, which is not there yet: put that before it"
                lines.append(f"{cell} waits for {_message(lacking)} of rank {other}")
            else:
                assert full is not None  # because the rank waits
                other = full
                cell = _cell(rank, position, action)
                lines.append(
                    f"{cell} waits for room in the queue to rank {other}, which holds {self._queue}",
                )
            if self._position[other] == len(self._schedule.rows[other]):
                return f"{lines[-1]}, which has no such action left"
            chain.append(other)
        return "deadlock: " + "; ".join(lines[chain.index(chain[-1]) :])


def _carried(message: Action) -> Action:
    """Return the result that a send or a receive transfers."""
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
