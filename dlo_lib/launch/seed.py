"""A process that has imported torch and forks warm servers, which share its memory with the kernel.

A kernel and the warm server of its ranks hold 130 MB each of the same data, because each imports torch. On a
Hub this decides how many students fit on a machine. So a process that will be a kernel imports torch, forks
the *seed*, and continues; the seed waits, and forks a warm server when one is needed. All of them share the
pages of the import. The fork comes before the kernel has threads, because none of them would survive it.

The seed ends with the kernel, whose end closes the socket. The kernel's process group is sent interrupts, so
the seed and the servers lead separate sessions.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
from collections.abc import Sequence
from typing import IO, NoReturn

from dlo_lib.base.garbage import without_collector
from dlo_lib.base.one_thread import ONE_THREAD, import_without_threads

_ASK = struct.Struct("!i")  # the kernel's process
_PID = struct.Struct("!i")  # of the new server


class SeededServer:
    """A warm server that the seed has forked: what ``client`` needs of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None while it runs."""
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises:
            TimeoutError: it still runs.
        """
        if not select.select([self._handle], [], [], timeout)[0]:
            raise TimeoutError

    def kill(self) -> None:
        """End it."""
        signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Seed:
    """The kernel's side of the seed."""

    def __init__(self, end: socket.socket) -> None:
        self._owner, self._socket = os.getpid(), end

    def fork(self, client: socket.socket, errors: IO[bytes]) -> SeededServer | None:
        """Return a new server, which serves ``client`` and writes its errors to a file; None if the seed has
        ended, or if this process was forked from the kernel.
        """
        if self._owner != os.getpid():
            return None
        try:
            socket.send_fds(self._socket, [_ASK.pack(self._owner)], [client.fileno(), errors.fileno()])
            (pid,) = _PID.unpack(self._socket.recv(_PID.size, socket.MSG_WAITALL))
            return SeededServer(pid)
        except (OSError, struct.error):
            return None


def sow(modules: Sequence[str]) -> Seed:
    """Import ``modules``, of which one is torch, and fork the seed. This process must have no thread yet."""
    with import_without_threads(), without_collector():
        for name in (*modules, "dlo_lib.launch.rank", "dlo_lib.launch.server"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to pages that the processes share
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    return Seed(ours)


def serve(kernel: socket.socket) -> NoReturn:
    """Fork a server for each request, and end after them, when the kernel has ended."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        while True:
            data, files, _, _ = socket.recv_fds(kernel, _ASK.size, 2)
            # Waited for, so that their CPU time is this process's: servers that were idle, and the last one,
            # which ends with the kernel.
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG if data else 0)[0]:
                    pass
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                kernel.close()
                _become_server(*files, *_ASK.unpack(data))
            for file in files:
                os.close(file)
            kernel.sendall(_PID.pack(pid))
    finally:
        os._exit(1)


def _become_server(client: int, errors: int, owner: int) -> None:
    os.setsid()
    os.dup2(errors, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As for a server that is started, see client.Server.
    os.environ |= {ONE_THREAD: "1", "TORCH_WARM_POOL": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    from dlo_lib.launch import server

    server.main(client, owner, shares_memory=True)
