"""The limits of what the judge computes with what one submission sends.

The student's processes have separate limits. What they send is decoded and compared in the judge, and a
text or a message can be made so that this takes minutes. So the judge of a submission may compute for
``SECONDS``: the check that runs then ends as timed out, and those after it do not run. Python sees the alarm
between two of its instructions; a single one that does not end costs ``MOST_SECONDS``, after which the kernel
ends the judge, and the row gets a report with the reason. An allocation beyond ``MEMORY`` raises
``MemoryError``.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from dlo_lib.base.text import tr
from dlo_lib.grading.sandbox.limits import limit_growth

SECONDS = 40  # of CPU time; the reference solutions need at most twelve
AGAIN_SECONDS = 2.0  # between two alarms after that
MOST_SECONDS = 60  # of CPU time
MEMORY = 1 << 30  # bytes beyond those of the service


class OwnTime:
    """The CPU time of this process, since :meth:`limited` began. It belongs to one submission."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.spent = False
        """Whether the time is over."""
        self._error: Callable[[str], Exception] | None = None

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Limit the CPU time and the memory of this process, which has one thread."""
        before = signal.signal(signal.SIGPROF, self._on_alarm)
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        most = int(used + MOST_SECONDS - SECONDS + self.seconds) + 1
        resource.setrlimit(
            resource.RLIMIT_CPU, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard)
        )
        signal.setitimer(signal.ITIMER_PROF, self.seconds, AGAIN_SECONDS)
        try:
            with limit_growth(MEMORY):
                yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

    @contextlib.contextmanager
    def ending(self, error: Callable[[str], Exception]) -> Iterator[None]:
        """Raise ``error`` of the reason in the context when the time is over; outside, it is only noted."""
        self._error = error
        try:
            yield
        finally:
            self._error = None

    @property
    def reason(self) -> str:
        """The sentence about the end of the time."""
        text = "the grader computed for {seconds:.0f} s with what you sent, which is its limit"
        return tr(text, seconds=self.seconds)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self.spent = True
        if self._error is not None:
            raise self._error(self.reason)


def stopped_reason() -> str:
    """Return the sentence about a judge that the kernel has ended after ``MOST_SECONDS``."""
    text = "the grader was stopped: it computed for more than {seconds} s with what you sent"
    return tr(text, seconds=MOST_SECONDS)


def memory_reason() -> str:
    """Return the sentence about an allocation beyond ``MEMORY``."""
    return tr("the grader needs more than {size} MiB of memory for what you sent", size=MEMORY >> 20)
