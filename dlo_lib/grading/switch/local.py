"""The switch in a notebook: served by a thread of the notebook's own process, for ranks that ``run_ranks`` starts.

Ranks reach it at a socket in a folder that only this user can open. No judge and no sandbox here: it is the same exchange, so that a check
sees the same traffic and a mistake gets the same words as in grading. Memory is read from /proc; where there is none, it is unknown.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from dlo_lib.grading.contract import Nudge, Wrong
from dlo_lib.grading.limits import resident_bytes
from dlo_lib.grading.switch.exchange import Exchange
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.service import TICK, Service
from dlo_lib.grading.switch.wire import Frame
from dlo_lib.launch.frames import shown_file

RANK = struct.Struct("!I")
M_MMAP_THRESHOLD = -3  # of mallopt(3)
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalSwitch:
    """A switch for ``world`` ranks, served while the context lasts. ``path``: where they reach it."""

    def __init__(self, world: int, nudge: Nudge | None = None) -> None:
        self.verdict: Wrong | None = None
        """Why the ranks were stopped: a dead-lock, calls that do not agree."""
        self.service: Service | None = None
        """None until every rank has come."""
        self._world, self._nudge = world, nudge
        self._fresh: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._stop = threading.Event()
        self._stack = ExitStack()
        self.path = os.path.join(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dlo-")), "switch")
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self.path)
        self._listener.listen(world)
        self._listener.settimeout(TICK)
        self._thread = threading.Thread(target=self._serve, name="dlo-switch", daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> LocalSwitch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()
        if self._failure is not None:
            raise self._failure

    # -- what the service asks and tells (service.Host)

    def memory(self, rank: int) -> int | None:
        """Bytes that the rank holds beyond what it held when it came."""
        return resident_bytes(self._pids[rank]) - self._fresh[rank] if rank in self._pids else None

    def other(self, rank: int, frame: Frame) -> bool | None:
        """A rank has nothing else to say: ``run_ranks`` takes its answer."""
        return None

    def gone(self, rank: int, exchange: Exchange) -> None:
        """``run_ranks`` says how it ended."""

    def look(self, exchange: Exchange) -> bool:
        """Until the notebook has what it wants."""
        return not self._stop.is_set()

    # -- the thread

    def _serve(self) -> None:
        lines: dict[int, socket.socket] = {}
        try:
            while len(lines) < self._world and not self._stop.is_set():
                self._accept(lines)
            if not self._stop.is_set():
                service = Service([lines[rank] for rank in range(self._world)], self, shown_file, self._nudge)
                self.service = service
                service.run()
        except Wrong as verdict:
            self.verdict = verdict
        except Exception as error:  # noqa: BLE001  raised again where the notebook waits
            self._failure = error
        finally:
            for line in lines.values():
                line.close()  # who still waits is told so

    def _accept(self, lines: dict[int, socket.socket]) -> None:
        try:
            line, _ = self._listener.accept()
        except TimeoutError:
            return
        line.setblocking(True)
        (rank,) = RANK.unpack(line.recv(RANK.size, socket.MSG_WAITALL))
        lines[rank] = line
        if sys.platform == "linux":
            self._pids[rank], *_ = CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            self._fresh[rank] = resident_bytes(self._pids[rank])


@contextmanager
def reached(path: str, rank: int) -> Iterator[Link]:
    """In a rank: a link to the switch at ``path``, told at the end how this rank ended."""
    _give_memory_back()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        line.sendall(RANK.pack(rank))
        link = Link(line)
        raised = True
        try:
            yield link
            raised = False
        finally:
            link.end(raised)


def _give_memory_back() -> None:
    """From here on freed tensors go back to the system at once, so that what is held is what is used; glibc would keep some."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 17)
