"""The warm server: a process that imports torch once and then forks each rank in milliseconds.

It replaces multiprocessing's ``forkserver``, which runs the caller's ``__main__`` in each child (a script
without ``if __name__ == "__main__"`` would start itself again), belongs to the thread that started it, gives
each rank a file that keeps the server alive when the caller is killed, and hides how a child ended. This
server is a single-threaded loop over one socket:
    the caller sends one *control* socket per launch, and modules to import before it forks; on the control
    socket, FORK with a rank's files, STACKS, or KILL; the end of the stream stops the launch
    the server answers with (rank, wait status) as each rank ends, and closes the socket when all have ended

No process is left behind. The server holds a pidfd of the caller, which becomes readable when the caller ends
for any reason, and then stops every rank. The kernel kills the ranks when the server itself ends. Each rank
leads a process group, so processes that a rank started end with it.

A rank tells the server when it leaves what it has imported of ``rank.WARM_PACKAGES``. The server imports that
too before it forks for the next launch, so that no later rank pays for it. A process that calls ``run_ranks``
once pays nothing for that.

Between launches the server collapses its memory into huge pages, unless it shares this memory with a seed. A
fork then copies a hundredth of the page table.

Cost: one import of torch (about 2 s of CPU time, 350 MB shared by all ranks), then about 15 ms per rank.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dlo_lib.base.huge_pages import collapse
from dlo_lib.base.ranks_idle import idle_minutes
from dlo_lib.launch.failure import STACK_SIGNAL

# torch.optim imports torch._dynamo with the first optimiser, which would cost each rank of each call 0.7 s.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "cloudpickle", "dlo_lib.launch.rank")
READY = b"ready"

REQUEST = struct.Struct("!ii")  # request, rank
REPORT = struct.Struct("!ii")  # rank, wait status or -errno if the fork failed
_PARENT_POLL_S = 0.5
_DATAGRAM_BYTES = 1 << 20
LAUNCH_BYTES = 1 << 16
"""The most bytes of a message that starts a launch: the modules to import, as JSON."""


class ServerRequest(enum.IntEnum):
    """What a launch can request. The end of the stream stops it, so stopping needs no request."""

    FORK = 1
    STACKS = 2
    KILL = 3
    """End one rank."""


@dataclass
class _Launch:
    control: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)  # process id -> rank, of the ranks that run
    stopping: bool = False

    def report(self, rank: int, status: int) -> None:
        with contextlib.suppress(OSError):  # the caller has ended
            self.control.sendall(REPORT.pack(rank, status))

    def signal(self, number: signal.Signals) -> None:
        for pid in self.ranks:
            _signal_group(pid, number)


class _Server:
    def __init__(
        self, client: socket.socket, parent: int, idle_s: float, shares_memory: bool = False
    ) -> None:
        self._client = client
        self._shares_memory = shares_memory
        self._collapsing: Iterator[bool] = iter(())
        self._has_new_pages = True
        self._idle_s = idle_s  # 0: wait for a launch without end
        self._used = time.monotonic()
        self._retired = False
        self._parent = parent
        self._launches: list[_Launch] = []
        # Each rank sends one datagram.
        self._imports, self._say_imports = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write, self._imports.fileno(), self._say_imports.fileno()):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._listen(self._wake_read, self._reap)
        self._listen(client, self._on_launch)
        self._parent_handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(ProcessLookupError):
                self._parent_handle = os.pidfd_open(parent)
                self._listen(self._parent_handle, self._leave)

    def serve(self) -> None:
        """Serve until the parent has ended."""
        while True:
            # Not while a rank lives, which shares the pages.
            collapses = not self._launches and next(self._collapsing, False)
            for key, _ in self._selector.select(0 if collapses else self._wait_s()):
                key.data()
            if self._parent_handle is None and os.getppid() != self._parent:
                self._leave()
            if self._launches:
                self._used = time.monotonic()
            elif self._idle_s and time.monotonic() - self._used >= self._idle_s:
                self._retire()

    def _wait_s(self) -> float | None:
        """Return the longest time without an event."""
        limits = [_PARENT_POLL_S] if self._parent_handle is None else []
        if self._idle_s and not self._launches:
            limits.append(max(0.0, self._used + self._idle_s - time.monotonic()))
        return min(limits, default=None)

    def _retire(self) -> None:
        """End for lack of launches. The caller can send no more; what it has sent is served first."""
        if not self._retired:
            self._retired = True
            self._client.shutdown(socket.SHUT_RD)
            self._selector.unregister(self._client)
            while self._take_launch():
                pass
        if not self._launches:
            self._leave()

    def _listen(self, source: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def _on_launch(self) -> None:
        if not self._take_launch():
            self._leave()

    def _take_launch(self) -> bool:
        """Start the next launch; return False at the end of the stream."""
        # One message at a time, because the kernel does not join messages that carry files.
        data, files, _, _ = socket.recv_fds(self._client, LAUNCH_BYTES, 1)
        if not data:
            return False
        self._import_what_ranks_did()
        self._import(json.loads(data))
        for file in files:
            launch = _Launch(socket.socket(fileno=file))
            self._launches.append(launch)
            self._listen(launch.control, functools.partial(self._on_request, launch))
        return True

    def _import_what_ranks_did(self) -> None:
        with contextlib.suppress(BlockingIOError):  # no rank has more to say
            while True:
                self._import(json.loads(self._imports.recv(_DATAGRAM_BYTES)))

    def _import(self, names: Sequence[str]) -> None:
        for name in names:
            # The next rank that needs a module which cannot be imported fails by itself, where it is seen.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if names:
            _settle()
            self._has_new_pages = True

    def _on_request(self, launch: _Launch) -> None:
        try:
            data, files, _, _ = socket.recv_fds(launch.control, REQUEST.size, 8)
        except ConnectionError:
            data, files = b"", []
        if not data:
            self._stop(launch)
            return
        what, rank = REQUEST.unpack(data)
        if what == ServerRequest.FORK:
            self._fork(launch, rank, files)
        elif what == ServerRequest.STACKS:
            for pid in launch.ranks:
                os.kill(pid, STACK_SIGNAL)
        elif what == ServerRequest.KILL:
            for pid, other in launch.ranks.items():
                if other == rank:
                    _signal_group(pid, signal.SIGKILL)

    def _fork(self, launch: _Launch, rank: int, files: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            launch.report(rank, -(error.errno or errno.EAGAIN))
        else:
            if pid == 0:
                self._run_child(rank, files)
            with contextlib.suppress(OSError):  # the rank makes the same call; the earlier one takes effect
                os.setpgid(pid, pid)
            launch.ranks[pid] = rank
        for file in files:
            os.close(file)

    def _run_child(self, rank: int, files: list[int]) -> None:
        """Run in the child: close everything that belongs to the server and become a rank. Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            server = os.getppid()
            self._selector.close()
            for end in (self._client, self._imports, *(launch.control for launch in self._launches)):
                end.close()
            for file in (self._wake_read, self._wake_write, self._parent_handle):
                if file is not None:
                    os.close(file)
            from dlo_lib.launch.rank import run_rank

            run_rank(rank, server, self._say_imports, *files)
        except BaseException:  # noqa: BLE001  the child must not return into the server's loop
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
                    _signal_group(pid, signal.SIGKILL)  # processes that the rank started
                    launch.report(rank, status)
            self._remove_if_ended(launch)

    def _stop(self, launch: _Launch) -> None:
        launch.stopping = True
        self._selector.unregister(launch.control)
        launch.signal(signal.SIGKILL)
        self._remove_if_ended(launch)

    def _remove_if_ended(self, launch: _Launch) -> None:
        if launch.stopping and not launch.ranks:
            self._launches.remove(launch)
            launch.control.close()
            # Not before the first launch: a program that calls run_ranks once does not pay for this.
            if self._has_new_pages and not self._shares_memory:
                self._has_new_pages, self._collapsing = False, collapse()

    def _leave(self) -> None:
        for launch in self._launches:
            launch.signal(signal.SIGKILL)
        os._exit(0)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _settle() -> None:
    """After imports: what is there now belongs to all ranks."""
    gc.freeze()
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        # torch takes its operators down one by one, 0.1 s in each rank. What a rank's
        # own code adds still runs.
        finalizer.atexit = False


def main(file: int, parent: int, shares_memory: bool = False) -> None:
    """Run the server: import the modules, report readiness, serve.

    ``file`` is a socket to the process ``parent``. ``shares_memory``: with other processes that live, so that
    a collapse into huge pages would copy it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # imports leave no garbage, and a collection would write to pages that the ranks share
    for module in PRELOAD:
        importlib.import_module(module)
    from dlo_lib.launch.rank import warm_up

    warm_up()
    _settle()
    client = socket.socket(fileno=file)
    client.sendall(READY)
    _Server(client, parent, 60 * idle_minutes(), shares_memory).serve()
