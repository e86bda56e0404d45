"""The switch in a notebook: a thread of the notebook's process serves the ranks that ``run_ranks`` starts.

Ranks reach it at a socket in a folder that only this user can open. There is no judge and no sandbox, but the
same exchange, so that a check sees the same traffic and a mistake gets the same message as in grading. Memory
is read from /proc; on systems without it, it is unknown.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.contract import Nudge, Wrong
from dlo_lib.grading.switch.exchange import Exchange
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.memory import exact_bytes
from dlo_lib.grading.switch.own_memory import (
    load_driver,
    map_large_tensors,
    reserve_small_objects,
    return_free_memory,
)
from dlo_lib.grading.switch.server import TICK, SwitchServer
from dlo_lib.grading.switch.wire import Frame
from dlo_lib.launch.frames import display_name

RANK = struct.Struct("!I")
READY = b"\0"
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalSwitch:
    """A switch for ``world`` ranks, served in a context. ``path``: its socket.

    ``asked``: the functions of the check that each rank may call; the thread of the switch calls them.
    """

    def __init__(self, world: int, nudge: Nudge | None = None, asked: Sequence[Sequence[Asked]] = ()) -> None:
        self.verdict: Wrong | None = None
        """The reason for which the ranks were stopped: a deadlock, or calls that do not agree."""
        self.service: SwitchServer | None = None
        """None until every rank is connected."""
        self._world, self._nudge, self._asked = world, nudge, asked
        self._initial_bytes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._stop = threading.Event()
        self._stack = ExitStack()
        self.path = os.path.join(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dlo-")), "switch"
        )
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self.path)
        self._listener.listen(world)
        self._listener.settimeout(TICK)
        self._thread = threading.Thread(target=self._serve, name="dlo-switch", daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> LocalSwitch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()
        if self._failure is not None:
            raise self._failure

    # -- server.Host

    def memory(self, rank: int) -> int | None:
        """Return the bytes that the rank holds beyond those at its connection; None if unknown."""
        return exact_bytes(self._pids[rank]) - self._initial_bytes[rank] if rank in self._pids else None

    def source_file(self, file: str) -> str:
        """Return ``file``: the ranks and this process belong to the same user."""
        return file

    def handle_frame(self, rank: int, frame: Frame) -> bool | None:
        """Ignore the frame: ``run_ranks`` receives the answer of a rank."""
        return None

    def disconnected(self, rank: int, exchange: Exchange) -> None:
        """Do nothing: ``run_ranks`` reports how the rank ended."""

    def poll(self, exchange: Exchange) -> bool:
        """Return False when the context ends."""
        return not self._stop.is_set()

    # -- the thread

    def _serve(self) -> None:
        lines: dict[int, socket.socket] = {}
        try:
            while len(lines) < self._world and not self._stop.is_set():
                self._accept(lines)
            if not self._stop.is_set():
                ends = [lines[rank] for rank in range(self._world)]
                service = SwitchServer(ends, self, display_name, self._nudge, asked=self._asked)
                self.service = service
                service.run()
        except Wrong as verdict:
            self.verdict = verdict
        except Exception as error:  # noqa: BLE001  __exit__ raises it
            self._failure = error
        finally:
            for line in lines.values():
                line.close()  # ends the waits of ranks

    def _accept(self, lines: dict[int, socket.socket]) -> None:
        try:
            line, _ = self._listener.accept()
        except TimeoutError:
            return
        line.setblocking(True)
        (rank,) = RANK.unpack(line.recv(RANK.size, socket.MSG_WAITALL))
        lines[rank] = line
        if sys.platform == "linux":
            self._pids[rank], *_ = CREDENTIALS.unpack(
                line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
            self._initial_bytes[rank] = exact_bytes(self._pids[rank])
        line.sendall(READY)


@contextmanager
def connected_link(path: str, rank: int, measured: bool = True) -> Iterator[Link]:
    """In a rank, connect to the switch at ``path``; at the end, report how this rank ended.

    The rank computes with one thread from here on, as in grading: sums have the same order, and the memory
    that a matrix product uses does not depend on the number of processors.

    Args:
        measured: the scenario has marks. A rank without marks does not load the driver of a GPU.
    """
    torch.set_num_threads(1)
    map_large_tensors()
    if measured:
        load_driver()
        reserve_small_objects()
        return_free_memory()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        line.sendall(RANK.pack(rank))
        line.recv(len(READY))  # the switch has read the memory of this process: only now may it grow
        link = Link(line)
        raised = True
        try:
            yield link
            raised = False
        finally:
            link.end(raised)
