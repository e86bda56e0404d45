"""Waiting for the end of a job, and the error of a job that did not complete.

A wait continues while SLURM does not answer. The caller chooses how often it looks
(:func:`seconds_between`), because each query costs the controller of a cluster time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from dlo_lib.base.text import tr
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.slurm.invocation import seconds_of
from dlo_lib.cluster.slurm.states import ElementStatus

SLURM_POLL_S, LOCAL_POLL_S = 5.0, 0.5
TAIL_LINES = 20
"""Lines of output in the message of a job that failed."""


class JobFailed(Exception):
    """A job did not complete: which elements, how they ended, and the cause for the first of them.

    The cause is the error of the rank that failed first, the table of a deadlock, or else the last output.
    """


def seconds_between(scheduler: Scheduler, poll: float | None = None) -> float:
    """Return the seconds between two queries: ``poll``, ``$DLO_POLL_S``, or the scheduler's default."""
    default = LOCAL_POLL_S if scheduler is Scheduler.LOCAL else SLURM_POLL_S
    return poll if poll is not None else seconds_of("DLO_POLL_S", default)


def wait_until(
    ended: Callable[[], list[ElementStatus] | None], pace: float, timeout: float | None, name: str
) -> list[ElementStatus]:
    """Wait until ``ended`` returns the statuses of a job that is over, and return them.

    Args:
        ended: returns None while the job runs, or while SLURM does not answer.
        pace: seconds between two calls.
        timeout: seconds; None waits forever.
        name: of the job.

    Raises:
        JobFailed: ``timeout`` passed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while (statuses := ended()) is None:
        if deadline is not None and time.monotonic() > deadline:
            raise JobFailed(tr("{job} is not over after {seconds:g} s", job=name, seconds=timeout))
        time.sleep(pace)
    return statuses


async def wait_until_async(
    ended: Callable[[], list[ElementStatus] | None], pace: Callable[[], float]
) -> list[ElementStatus]:
    """Wait until ``ended``, which is called in a thread, returns statuses, and return them."""
    while (statuses := await asyncio.to_thread(ended)) is None:
        await asyncio.sleep(pace())
    return statuses


def failure(name: str, failed: Sequence[ElementStatus], elements: int, cause: str, tail: str) -> JobFailed:
    """Return the error of a job that did not complete.

    Args:
        name: of the job.
        failed: the elements that did not complete.
        elements: the number of all elements.
        cause: why the first of them failed; "" if it is not known.
        tail: the last output of the first of them, shown if the cause is not known.
    """
    first = failed[0]
    code = tr(" with status {code}", code=first.exit_code) if first.exit_code is not None else ""
    reason = f" ({first.reason})" if first.reason and not cause else ""
    said = tr(
        "{job}: element {element} {state}{code}{reason}; {count} of {all} did not complete. "
        "resubmit() runs {them} again.",
        them=tr("it") if len(failed) == 1 else tr("them"),
        job=name,
        element=first.element,
        state=first.text,
        code=code,
        reason=reason,
        count=len(failed),
        all=elements,
    )
    if cause:
        return JobFailed(tr("{said} logs() shows its output.\n\n{cause}", said=said, cause=cause))
    if not tail:
        return JobFailed(tr("{said} It has printed nothing.", said=said))
    return JobFailed(tr("{said} Its last lines of output:\n{tail}", said=said, tail=tail))
