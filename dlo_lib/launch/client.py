"""The caller's side of the warm server: start it once, ask it for ranks, and be sure that they end.

There is one server per process, started by the first launch and replaced when it is found dead or belongs to the process that this one was
forked from. The only way to it is a socket pair made here, so no other user or notebook can reach it. A launch is one more socket pair:
closing our end stops its ranks, whatever else goes wrong.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import dlo_lib
from dlo_lib.comm.board import Board
from dlo_lib.launch.frames import stack_as_traceback
from dlo_lib.launch.server import READY, REPORT, REQUEST, Request

_STOP_TIMEOUT_S = 5.0
_STACKS_TIMEOUT_S = 0.5
_BLACK_BOX_BYTES = 1 << 20
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from dlo_lib.launch.server import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


@dataclass
class RankFiles:
    """The parent's ends of what connects it with one rank."""

    channel: socket.socket  # the rank's result or error; the end of our stream tells the rank to leave
    output: int  # all that the rank prints
    black_box: IO[bytes]  # stacks that faulthandler writes, on demand or in a crash

    def stack(self) -> str:
        """What the black box holds, most recent call last, as a traceback."""
        data = os.pread(self.black_box.fileno(), _BLACK_BOX_BYTES, 0)
        return stack_as_traceback(data.decode(errors="replace"))

    def close(self) -> None:
        self.channel.close()
        os.close(self.output)
        self.black_box.close()


class Server:
    """The server process of this process."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the server is
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), str(self._owner), json.dumps(_module_path())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # a Ctrl-C in the terminal is for the caller alone, which then stops its ranks
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # or NumPy starts a thread, which no fork survives
            )
        try:
            ready = ours.recv(len(READY))
        except BaseException:
            self._process.kill()
            self.close()
            raise
        if ready != READY:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            self.close()
            raise RuntimeError(f"the server that starts ranks did not start:\n{said}")
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def launch(self) -> socket.socket:
        """The control socket of a new launch."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"L"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the server, and with it every rank that is left."""
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # close() is not enough: a process forked from this one holds a copy
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._socket.close()
        self._errors.close()


_server: Server | None = None  # one per process, as an import is: a warm start is worth nothing if each call pays for it
_lock = threading.Lock()


def _open_launch() -> socket.socket:
    global _server
    with _lock:
        if _server is not None and not _server.usable:
            _server.close()
            _server = None
        if _server is None:
            _server = Server()
        return _server.launch()


class Launch:
    """The ranks of one call. As a context manager: on leaving, none of them lives."""

    def __init__(self, world_size: int, job: bytes) -> None:
        self.files: list[RankFiles] = []
        self.control = _open_launch()
        self.board = Board(world_size)
        try:
            # The job is written once for all ranks. The listener is where they will meet (rank 0 serves the store on it): its port is taken
            # from now on, so two launches never want the same one.
            with _shared_file() as shared, socket.create_server(("127.0.0.1", 0), backlog=max(128, world_size)) as listener:
                shared.write(job)
                shared.flush()
                for rank in range(world_size):
                    self._fork(rank, shared.fileno(), listener.fileno())
        except BaseException:
            self.close()
            raise

    def _fork(self, rank: int, job: int, listener: int) -> None:
        channel, theirs = socket.socketpair()
        read, write = os.pipe()
        black_box = _shared_file()
        self.files.append(RankFiles(channel, read, black_box))
        os.set_blocking(read, False)
        channel.setblocking(False)
        try:
            files = [theirs.fileno(), write, black_box.fileno(), job, listener, self.board.descriptor]
            socket.send_fds(self.control, [REQUEST.pack(Request.FORK, rank)], files)
        finally:
            theirs.close()
            os.close(write)

    def next_exit(self) -> tuple[int, int] | None:
        """The next (rank, wait status) from the server, waiting for it; None when no more will come."""
        try:
            data = self.control.recv(REPORT.size, socket.MSG_WAITALL)
        except ConnectionError:
            return None
        return REPORT.unpack(data) if len(data) == REPORT.size else None

    def let_go(self) -> None:
        """Tell the ranks, which hold their connections open for each other, that all have what they need."""
        for files in self.files:
            with contextlib.suppress(OSError):  # that one has gone already
                files.channel.shutdown(socket.SHUT_WR)

    def stacks(self) -> list[str]:
        """Each rank's stack now, most recent call last, in the words of a traceback; empty for a rank that cannot be asked."""
        self.control.sendall(REQUEST.pack(Request.STACKS, 0))
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        while time.monotonic() < deadline and not all(_size(files.black_box) for files in self.files):
            time.sleep(0.02)
        time.sleep(0.02)  # the last one may still be writing
        return [files.stack() for files in self.files]

    def stop(self) -> None:
        """Kill what is left of the ranks and wait until they are gone. What they wrote can still be read."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
            self.control.settimeout(_STOP_TIMEOUT_S)
            while self.next_exit() is not None:
                pass
        self.control.close()

    def close(self) -> None:
        self.stop()
        self.board.close()
        for files in self.files:
            files.close()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _shared_file() -> IO[bytes]:
    """A file without a name: in memory on Linux, so that nothing is left when all processes are killed."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dlo-launch"), "wb+", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _module_path() -> list[str]:
    """``sys.path`` without the current folder, where a ``random.py`` of the user's would hide Python's own from the server."""
    home = str(Path(dlo_lib.__file__).parents[1])
    return [*(entry for entry in sys.path if entry not in ("", current_folder())), home]


def current_folder() -> str | None:
    """The current folder, or None when it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
