"""Requests to stop: SIGTERM and SIGUSR1 end a run between two steps, with a checkpoint.

SLURM sends a chosen signal some time before the time limit of a job (``--signal=USR1@90``), and SIGTERM when
the job is cancelled or pre-empted. A handler can run between any two bytecodes, so it only sets a flag, which
the loop reads between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """A context that records the signals of ``STOP_SIGNALS`` and restores the previous handlers at its end.

    Only the main thread receives signals; in another thread the context does nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
