"""The warm server: a process that has imported torch once, and forks a rank in milliseconds whenever it is asked to.

It is a server of our own and not multiprocessing's ``forkserver``, because that one runs the caller's ``__main__`` again in each child (a
script without ``if __name__ == "__main__"`` would start itself anew), belongs to the thread that started it, gives each rank a file that
keeps the server alive when the caller is killed, and hides how a child ended. This one is a single-threaded loop over one socket:
    the caller sends a *control* socket per launch; on it, FORK with a rank's files, STACKS, or the end of the stream: stop this launch
    the server answers with (rank, wait status) as each rank ends, and closes once all of a launch are gone

Nobody is left behind: the server holds a pidfd of the caller, which becomes readable when that process is gone, however it went, and
then stops every rank; the kernel kills the ranks when the server itself goes. Each rank leads a process group, so that what a rank has
started goes with it.

Cost: one import of torch (about 2 s of CPU, 350 MB shared by all ranks), then some 15 ms a rank.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

# torch.optim imports torch._dynamo when the first optimiser is made: 0.7 s that each rank of each call would pay again.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "cloudpickle", "dlo_lib.launch.rank")
READY = b"ready"

REQUEST = struct.Struct("!ii")  # what, rank
REPORT = struct.Struct("!ii")  # rank, wait status; or -errno when it could not be forked
STACK_SIGNAL = signal.SIGUSR2  # training scripts use SIGUSR1
_PARENT_POLL_S = 0.5


class Request(enum.IntEnum):
    """What a launch can ask for; stopping needs no word, the end of the stream is enough."""

    FORK = 1
    STACKS = 2


@dataclass
class _Launch:
    control: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)  # process id -> rank, those that live
    stopping: bool = False

    def report(self, rank: int, status: int) -> None:
        with contextlib.suppress(OSError):  # the caller is gone: nobody to tell
            self.control.sendall(REPORT.pack(rank, status))

    def signal(self, number: signal.Signals) -> None:
        for pid in self.ranks:
            _signal_group(pid, number)


class _Server:
    def __init__(self, client: socket.socket, parent: int) -> None:
        self._client = client
        self._parent = parent
        self._launches: list[_Launch] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._listen(self._wake_read, self._reap)
        self._listen(client, self._accept)
        self._parent_handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(ProcessLookupError):
                self._parent_handle = os.pidfd_open(parent)
                self._listen(self._parent_handle, self._leave)

    def serve(self) -> None:
        """Until the parent is gone."""
        timeout = None if self._parent_handle is not None else _PARENT_POLL_S
        while True:
            for key, _ in self._selector.select(timeout):
                key.data()
            if os.getppid() != self._parent:
                self._leave()

    def _listen(self, source: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def _accept(self) -> None:
        data, files, _, _ = socket.recv_fds(self._client, 1, 1)
        if not data:
            self._leave()
        for file in files:
            launch = _Launch(socket.socket(fileno=file))
            self._launches.append(launch)
            self._listen(launch.control, functools.partial(self._obey, launch))

    def _obey(self, launch: _Launch) -> None:
        try:
            data, files, _, _ = socket.recv_fds(launch.control, REQUEST.size, 8)
        except ConnectionError:
            data, files = b"", []
        if not data:
            self._stop(launch)
            return
        what, rank = REQUEST.unpack(data)
        if what == Request.FORK:
            self._fork(launch, rank, files)
        elif what == Request.STACKS:
            for pid in launch.ranks:
                os.kill(pid, STACK_SIGNAL)

    def _fork(self, launch: _Launch, rank: int, files: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            launch.report(rank, -(error.errno or errno.EAGAIN))
        else:
            if pid == 0:
                self._become(rank, files)
            with contextlib.suppress(OSError):  # the rank does the same: whoever comes first
                os.setpgid(pid, pid)
            launch.ranks[pid] = rank
        for file in files:
            os.close(file)

    def _become(self, rank: int, files: list[int]) -> None:
        """In the child: drop all that is the server's and be a rank. Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            server = os.getppid()
            self._selector.close()
            for end in (self._client, *(launch.control for launch in self._launches)):
                end.close()
            for file in (self._wake_read, self._wake_write, self._parent_handle):
                if file is not None:
                    os.close(file)
            from dlo_lib.launch.rank import run_rank

            run_rank(rank, server, *files)
        except BaseException:  # noqa: BLE001  it must not come back into the server's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        for launch in list(self._launches):
            for pid, rank in list(launch.ranks.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del launch.ranks[pid]
                    _signal_group(pid, signal.SIGKILL)  # what it has started and left
                    launch.report(rank, status)
            self._forget_if_over(launch)

    def _stop(self, launch: _Launch) -> None:
        launch.stopping = True
        self._selector.unregister(launch.control)
        launch.signal(signal.SIGKILL)
        self._forget_if_over(launch)

    def _forget_if_over(self, launch: _Launch) -> None:
        if launch.stopping and not launch.ranks:
            self._launches.remove(launch)
            launch.control.close()

    def _leave(self) -> None:
        for launch in self._launches:
            launch.signal(signal.SIGKILL)
        os._exit(0)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def main(file: int, parent: int) -> None:
    """The whole life of the server: import, say so, serve. ``file`` is a socket to the process ``parent``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # imports leave no garbage; a collection would only write to pages that the ranks share
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False  # torch takes its operators down one by one, 0.1 s in each rank; what a rank's own code adds still runs
    client = socket.socket(fileno=file)
    client.sendall(READY)
    _Server(client, parent).serve()
