"""A run that is asked to stop: SIGTERM and SIGUSR1 end it between two steps, with a checkpoint and status 75.

SLURM sends a chosen signal some time before the time limit of a job (``--signal=B:USR1@90``), and SIGTERM
when the job is cancelled or pre-empted. A handler can run between any two bytecodes, so it only sets a flag,
which the program reads between two steps. The default action of both signals ends the process. ``python -m
dlo_lib.train`` therefore notes them from the import of this module on, before PyTorch is imported, and
ignores them while it ends.

A program of a user that handles the signals in the same way declares it with ``HANDLES_STOP = True``
(``dlo_lib.cluster.script.work``) and reports its progress (``dlo_lib.base.progress``).
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STOPPED = 75
"""Exit status of a run that stopped early, with a checkpoint (EX_TEMPFAIL in sysexits.h: try again later)."""
_NOTES_EARLY = "dlo_lib.train"
_early: list[str] = []


class StopRequests:
    """A context that records the signals of ``STOP_SIGNALS`` and restores the previous handlers at its end.

    ``received`` is the name of the last signal, or None. Only the main thread receives signals; in another
    thread the context does nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
            if _early and self.received is None:
                self.received = _early[-1]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


def ignore_stop_requests() -> None:
    """Ignore the signals from now on; a program calls it last, when its exit status is fixed.

    While Python ends, it restores the default action of every signal that has a handler. A signal would then
    end the process, and a completed run would count as failed.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _note_early(number: int, frame: FrameType | None) -> None:
    _early.append(signal.Signals(number).name)


def _starts(module: str, arguments: list[str], whole: list[str]) -> bool:
    """Return whether ``python -m module`` is importing its package; ``arguments`` and ``whole`` are those of
    ``sys.argv`` and ``sys.orig_argv``.

    >>> _starts("a.b", ["-m", "--steps", "2"], ["python", "-u", "-m", "a.b", "--steps", "2"])
    True
    """
    return arguments[:1] == ["-m"] and whole[-len(arguments)] == module


if _starts(_NOTES_EARLY, sys.argv, sys.orig_argv):
    for _number in STOP_SIGNALS:
        signal.signal(_number, _note_early)
