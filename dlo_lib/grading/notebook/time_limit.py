"""End a call of the student's code in a notebook that takes too long, such as an endless loop.

An alarm raises an error in the main thread, between two operations of Python. A single operation in C, such
as one large matrix product, ends first.
"""

from __future__ import annotations

import linecache
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.faults import is_own

AGAIN_S = 1.0  # for code that catches every exception


class TooLong(BaseException):
    """The call did not end in time. Not an ``Exception``, so that ``except Exception`` does not catch it.

    ``line`` and ``source``: the innermost line of the student's cells; 0 and "" if there is none.
    """

    def __init__(self, line: int = 0, source: str = "") -> None:
        super().__init__("the call takes too long")
        self.line, self.source = line, source

    def message(self, seconds: float) -> str:
        """Return the message for the student, one line."""
        if not self.line:
            return tr("your code has not ended after {seconds:g} s", seconds=seconds)
        return tr(
            "your code is still in line {line} of your cell after {seconds:g} s: `{source}`",
            line=self.line, seconds=seconds, source=self.source,
        )  # fmt: skip


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TooLong` in the block after ``seconds``, and again each second.

    Does nothing outside the main thread, where no signal handler can run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        for inner, line in traceback.walk_stack(frame):
            file = inner.f_code.co_filename
            if is_own(file):
                raise TooLong(line, linecache.getline(file, line).strip()[:120])
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
