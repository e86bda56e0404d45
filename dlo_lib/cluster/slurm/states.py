"""The states of a job, the same for SLURM and for this machine."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dlo_lib.base.progress import RunProgress
from dlo_lib.base.stop import EXIT_STOPPED
from dlo_lib.base.text import tr


class State(enum.Enum):
    """The state of one element of a job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    """The run ended early with a checkpoint, because of a signal; it has not completed."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"
    UNKNOWN = "unknown"

    @property
    def over(self) -> bool:
        """Whether the element has ended."""
        return self not in (State.PENDING, State.RUNNING, State.UNKNOWN)


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
    """Return the state for a SLURM state; unlisted ones (configuring, completing, suspended) are running.

    >>> of_slurm("CANCELLED by 1000").value, of_slurm("COMPLETING").value
    ('cancelled', 'running')
    """
    return _OF_SLURM.get(name.split()[0].rstrip("+"), State.RUNNING)


@dataclass(frozen=True)
class ElementStatus:
    """The status of one element.

    Attributes:
        reason: why it waits, or how it ended.
        start: its start or expected start, in SLURM's format; "" if unknown.
        elapsed: run time of its current turn, in SLURM's format.
        exit_code: of its program; None before its end, or if it was killed.
        reached: of a run that has stopped, how far it is: ``49 of 400``; "" if unknown.
        is_final: whether a later look cannot correct it.
    """

    element: int
    state: State
    reason: str = ""
    start: str = ""
    elapsed: str = ""
    exit_code: int | None = None
    reached: str = ""
    is_final: bool = True

    @property
    def text(self) -> str:
        """The state in words: ``running``, ``stopped at 49 of 400``."""
        return (
            tr("{state} at {step}", state=self.state.value, step=self.reached)
            if self.reached
            else (self.state.value)
        )


def stopped_early(status: ElementStatus, progress: RunProgress | None) -> ElementStatus:
    """Return the status with the state STOPPED if the program ended with ``EXIT_STOPPED``.

    SLURM calls such an element failed, or pre-empted.
    """
    if status.exit_code != EXIT_STOPPED or status.state not in (State.FAILED, State.LOST):
        return status
    if progress is None:
        return replace(status, state=State.STOPPED)
    reached = tr("{step} of {steps}", step=progress.step, steps=progress.steps)
    reason = tr("SLURM did not requeue it: resubmit() continues it") if progress.refused else status.reason
    return replace(status, state=State.STOPPED, reached=reached, reason=reason)


def summary(statuses: Iterable[ElementStatus]) -> str:
    """Return the state of a single element in words, or the number of elements in each state.

    >>> summary([ElementStatus(0, State.RUNNING), ElementStatus(1, State.PENDING),
    ...          ElementStatus(2, State.PENDING)])
    '2 pending, 1 running'
    """
    found = list(statuses)
    if len(found) == 1:
        return found[0].text
    counts = Counter(status.state for status in found)
    return ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
