"""A warm process that forks ranks: torch is imported once, so that a rank starts in milliseconds.

multiprocessing's fork server is not used: it runs the caller's ``__main__`` again in every child (a notebook has none, and a script
without a guard would start over), and it outlives its parent as long as one child does. This one is a plain subprocess behind one socket.
Each request is one datagram with the rank's file descriptors; the rank's exit status comes back through a pipe of its own.

Whoever ends first takes the rest along: the parent's end of the socket closes when the parent dies, however it dies, and the server
then kills its ranks and leaves; the kernel kills a rank whose server died.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
PRELOADED = ("cloudpickle", "torch", "torch.distributed")
STATUS = struct.Struct("<i")


class ForkServer:
    """The parent's side: starts the server when it is first needed, and again when it is gone."""

    def __init__(self) -> None:
        self._owner = 0
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, channel: int, output: int, status: int, board: int | None = None) -> int:
        """Fork a rank that talks over ``channel``, prints to ``output``, and whose exit status is written to ``status``; its pid."""
        with self._lock:
            self._start()
            assert self._socket is not None
            descriptors = [channel, output, status] + ([board] if board is not None else [])
            socket.send_fds(self._socket, [b"fork"], descriptors)
            return int(self._socket.recv(32))

    def _start(self) -> None:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from dlo_lib.launch.server import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle
        )
        theirs.close()
        self._socket, self._owner = ours, os.getpid()
        if ours.recv(32) != b"ready":
            raise RuntimeError("the fork server did not start: see its message above")


def serve(descriptor: int) -> None:
    """The server's whole life."""
    for module in PRELOADED:
        importlib.import_module(module)
    from dlo_lib.launch.rank import run_rank

    control = socket.socket(fileno=descriptor)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[int, int] = {}
    with contextlib.suppress(OSError):
        control.send(b"ready")
    while True:
        ready = select.select([control.fileno(), woken], [], [])[0]
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _reap(ranks)
        if control.fileno() not in ready:
            continue
        message, descriptors, *_ = socket.recv_fds(control, 32, 4)
        if not message:  # the parent is gone
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        channel, output, status, *board = descriptors
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            die_with_parent(server)
            for other in (descriptor, woken, wake, status, *ranks.values()):
                os.close(other)
            run_rank(channel, output, board[0] if board else None)
        ranks[pid] = status
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        for given in (channel, output, *board):
            os.close(given)
        control.send(str(pid).encode())


def _reap(ranks: dict[int, int]) -> None:
    while ranks:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if (pipe := ranks.pop(pid, None)) is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends (Linux; elsewhere the server's own clean-up must do)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
