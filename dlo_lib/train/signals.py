"""A request to stop, as a flag: SIGTERM and SIGUSR1 end a run between two steps, with a checkpoint.

SLURM sends a signal of one's choice some time before a job's limit (``--signal=USR1@90``), and SIGTERM when it is cancelled or
pre-empted. A handler may run between any two lines of Python, so it only takes a note; the loop reads it where stopping is safe.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """A context in which the signals of ``STOP_SIGNALS`` are noted instead of killing the process; what they did before is restored.

    Signals arrive in the main thread only: in another one the context does nothing.
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
