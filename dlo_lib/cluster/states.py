"""What a job can be in, in words that hold for SLURM and for this machine alike."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


class State(enum.Enum):
    """The state of one element of a job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"

    @property
    def over(self) -> bool:
        return self not in (State.PENDING, State.RUNNING)


_OF_SLURM = {
    "BOOT_FAIL": State.LOST,
    "CANCELLED": State.CANCELLED,
    "COMPLETED": State.COMPLETED,
    "DEADLINE": State.TIMEOUT,
    "FAILED": State.FAILED,
    "NODE_FAIL": State.LOST,
    "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
    "PENDING": State.PENDING,
    "PREEMPTED": State.LOST,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "REVOKED": State.LOST,
    "SPECIAL_EXIT": State.PENDING,
    "TIMEOUT": State.TIMEOUT,
}


def of_slurm(name: str) -> State:
    """SLURM's state; all that are neither waiting nor an end (configuring, completing, suspended ...) count as running.

    >>> of_slurm("CANCELLED by 1000").value, of_slurm("COMPLETING").value
    ('cancelled', 'running')
    """
    return _OF_SLURM.get(name.split()[0].rstrip("+"), State.RUNNING)


@dataclass(frozen=True)
class ElementStatus:
    """One element now.

    reason: why it waits, or how it ended. start: when it began or is expected to, as SLURM writes it; empty when unknown. elapsed: of its
    present turn, as SLURM writes it. exit_code: of what it ran; None until then, or when it was killed.
    """

    element: int
    state: State
    reason: str = ""
    start: str = ""
    elapsed: str = ""
    exit_code: int | None = None


def summary(statuses: Iterable[ElementStatus]) -> str:
    """``completed``, or for a sweep how many are in which state.

    >>> summary([ElementStatus(0, State.RUNNING), ElementStatus(1, State.PENDING), ElementStatus(2, State.PENDING)])
    '2 pending, 1 running'
    """
    counts = Counter(status.state for status in statuses)
    if sum(counts.values()) == 1:
        return next(iter(counts)).value
    return ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
