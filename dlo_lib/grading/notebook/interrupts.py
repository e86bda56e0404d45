"""An interrupt (the button ■ of JupyterLab, Ctrl-C) as one sentence: what ran, and where the student's code
was. IPython's traceback of an interrupt has thousands of characters about this library and PyTorch.
"""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.faults import is_own


class CheckInterrupted(KeyboardInterrupt):
    """A check of ``lab.check`` was interrupted; the text names it. The error's cause has the place."""


def interrupt_sentence(error: BaseException, trace: TracebackType | None) -> str:
    """Return the sentence on ``error``, a KeyboardInterrupt with the traceback ``trace``."""
    cause = error.__cause__ if isinstance(error, CheckInterrupted) else None
    said = str(error) if isinstance(error, CheckInterrupted) else tr("Interrupted.")
    if place := _place(cause.__traceback__ if cause is not None else trace):
        line, source = place
        return tr("{said} Your code was in line {line}: `{source}`", said=said, line=line, source=source)
    return said


def _place(trace: TracebackType | None) -> tuple[int, str] | None:
    """The innermost line of the student's cells, except the one with ``lab.check``."""
    found = None
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if is_own(file):
            found = line, linecache.getline(file, line).strip()[:120]
    return found
