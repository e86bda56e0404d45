"""The caller's side of the warm server: start it once, request ranks, and make sure that they end.

Each process has one server. The first launch starts it; it is replaced if it is dead, or if it belongs to the
process that this one was forked from. It ends itself after ``idle_minutes`` without a launch, and the next
launch starts another. It is reached only by a socket pair created here, so no other user or
notebook can use it. Each launch has a separate socket pair: closing this end stops its ranks in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.ranks_idle import idle_minutes
from dlo_lib.comm.deadlock.board import Board
from dlo_lib.launch.frames import stack_as_traceback
from dlo_lib.launch.meeting import LOOPBACK, MeetingFiles
from dlo_lib.launch.seed import Seed, SeededServer
from dlo_lib.launch.server import READY, REPORT, REQUEST, ServerRequest

_STOP_TIMEOUT_S = 5.0
_STACKS_TIMEOUT_S = 0.5
_STACK_BYTES = 1 << 20
seed: Seed | None = None
"""Forks the server, if this process is a kernel that ``launch.seed`` has started."""
_BOOT = """
from dlo_lib.launch.server import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


@dataclass
class RankFiles:
    """The caller's ends of the connections to one rank."""

    channel: socket.socket  # the rank's result or error; the end of this stream asks the rank to leave
    output: int  # everything that the rank prints
    stack_file: IO[bytes]  # stacks that faulthandler writes, on request or in a crash

    def stack(self) -> str:
        """Return the last stack in the file as a traceback, most recent call last."""
        return stack_as_traceback(self.raw_stack().decode(errors="replace"))

    def raw_stack(self) -> bytes:
        """Return what is in the file of stacks."""
        return os.pread(self.stack_file.fileno(), _STACK_BYTES, 0)

    def close(self) -> None:
        """Close all connections."""
        self.channel.close()
        os.close(self.output)
        self.stack_file.close()


class Server:
    """The server of this process."""

    def __init__(self) -> None:
        idle_minutes()  # a wrong value is named here, and not in the server
        self._owner = os.getpid()
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  stays open as long as the server
        self._socket = ours
        self._process: SeededServer | subprocess.Popen[bytes]
        with theirs:
            self._process = (seed and seed.fork(theirs, self._errors)) or subprocess.Popen(
                trusted_python(_BOOT, str(theirs.fileno()), str(self._owner), user_settings=True),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                # Ctrl-C in the terminal reaches only the caller, which then stops its ranks.
                start_new_session=True,
                # No thread survives the fork: NumPy starts one when it is imported, torch._inductor a pool.
                # An imported module that looks for a GPU asks NVML, because CUDA, once asked, refuses to
                # start in a forked process.
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "TORCH_WARM_POOL": "0",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
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
        """Whether the server runs and belongs to this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def launch(self, modules: Sequence[str] = ()) -> socket.socket:
        """Start a launch, for which the server imports ``modules`` first; return its control socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [json.dumps(modules).encode()], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the server and all its ranks."""
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                # Close() is not enough: a forked process may hold a copy.
                self._socket.shutdown(socket.SHUT_RDWR)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except (subprocess.TimeoutExpired, TimeoutError):
                self._process.kill()
                self._process.wait()
        self._socket.close()
        self._errors.close()


_server: Server | None = None  # one per process: starting it takes longer than most calls
_lock = threading.Lock()


def _open_launch(modules: Sequence[str]) -> socket.socket:
    global _server
    with _lock:
        if _server is not None and not _server.usable:
            _server.close()
            _server = None
        if _server is not None:
            with contextlib.suppress(BrokenPipeError):  # it ends in this moment, because it was idle
                return _server.launch(modules)
            _server.close()
        _server = Server()
        return _server.launch(modules)


def end_server() -> None:
    """End the server of this process, and all ranks of this process; the next launch starts a new one."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
            _server = None


class Launch:
    """The ranks of one call. As a context manager, it ends all of them on exit.

    Args:
        job: a pickled ``rank.LaunchSpec``.
        modules: what the server imports before it forks the ranks.
        ranks: those of this machine; None: all.
        meeting: where the ranks meet, if other machines have some of them; None: all are on this machine.
    """

    def __init__(
        self,
        world_size: int,
        job: bytes,
        modules: Sequence[str] = (),
        ranks: range | None = None,
        meeting: MeetingFiles | None = None,
    ) -> None:
        self.ranks = range(world_size) if ranks is None else ranks
        self.files: list[RankFiles] = []  # in the order of ``ranks``
        self.control = _open_launch(modules)
        self.board = Board(world_size)
        self._meeting: MeetingFiles | None = None
        try:
            # The job is written once for all ranks.
            with shared_file() as shared:
                shared.write(job)
                shared.flush()
                if meeting is None and 0 in self.ranks:
                    meeting = MeetingFiles(world_size, LOOPBACK)
                self.meet(meeting)
                for rank in self.ranks:
                    self.files.append(self._fork(rank, shared.fileno(), meeting))
                if meeting is not None:
                    meeting.close()
        except BaseException:
            self.close()
            raise

    def meet(self, meeting: MeetingFiles | None) -> None:
        """Note where the ranks meet from now on, and remove what was left of where they met before."""
        if self._meeting is not None:
            self._meeting.remove()
        self._meeting = meeting

    def replace(self, rank: int, job: bytes, meeting: MeetingFiles | None) -> None:
        """Fork a new process for a rank whose process has ended."""
        with shared_file() as shared:
            shared.write(job)
            shared.flush()
            files = self._fork(rank, shared.fileno(), meeting)
        index = self.ranks.index(rank)
        self.files[index].close()
        self.files[index] = files

    def kill(self, rank: int) -> None:
        """End the process of one rank; ``next_exit`` reports it."""
        self.control.sendall(REQUEST.pack(ServerRequest.KILL, rank))

    def lost(self) -> str:
        """Return why no more ends of ranks will be reported."""
        return "the process that forks the ranks was killed (out of memory?): call again to start a new one"

    def _fork(self, rank: int, job: int, meeting: MeetingFiles | None) -> RankFiles:
        ours, theirs, write = connect_rank()
        try:
            its = [theirs.fileno(), write, ours.stack_file.fileno(), job, self.board.descriptor]
            if meeting is not None:
                its += meeting.descriptors
            socket.send_fds(self.control, [REQUEST.pack(ServerRequest.FORK, rank)], its)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(write)
        return ours

    def next_exit(self) -> tuple[int, int] | None:
        """Wait for the next (rank, wait status) from the server; None if no more will come."""
        try:
            data = self.control.recv(REPORT.size, socket.MSG_WAITALL)
        except ConnectionError:
            return None
        return REPORT.unpack(data) if len(data) == REPORT.size else None

    def release(self) -> None:
        """Release the ranks, which keep their connections open for each other until all have answered."""
        for files in self.files:
            with contextlib.suppress(OSError):  # this rank has ended already
                files.channel.shutdown(socket.SHUT_WR)

    def stacks(self) -> list[str]:
        """Return the stack of each rank as a traceback, most recent call last; "" without an answer."""
        self.write_stacks()
        return [files.stack() for files in self.files]

    def write_stacks(self) -> None:
        """Let each rank write its stack to its file."""
        self.control.sendall(REQUEST.pack(ServerRequest.STACKS, 0))
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        while time.monotonic() < deadline and not all(_size(files.stack_file) for files in self.files):
            time.sleep(0.02)
        time.sleep(0.02)  # the last rank may still be writing

    def stop(self) -> None:
        """Kill the remaining ranks and wait until they have ended. Their output can still be read."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
            self.control.settimeout(_STOP_TIMEOUT_S)
            while self.next_exit() is not None:
                pass
        self.control.close()

    def close(self) -> None:
        """Stop the ranks and close all connections."""
        self.stop()
        self.meet(None)
        self.board.close()
        for files in self.files:
            files.close()

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect_rank() -> tuple[RankFiles, socket.socket, int]:
    """Return new connections to one rank: the caller's ends, and the rank's ends of its channel and its
    output."""
    channel, theirs = socket.socketpair()
    read, write = os.pipe()
    os.set_blocking(read, False)
    channel.setblocking(False)
    return RankFiles(channel, read, shared_file()), theirs, write


def shared_file() -> IO[bytes]:
    """Return a file without a name (in memory on Linux), of which nothing is left after a kill."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dlo-launch"), "wb+", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
