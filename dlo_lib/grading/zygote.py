"""A warm process that forks the student's processes: torch is imported once, so that each starts in milliseconds.

It never runs a student's code itself, has one thread, and has what the lab teaches withheld from its beginning. Requests come as
datagrams with two descriptors, the worker's channel and the pipe for its exit status; the answer is the pid with a pidfd. Its own end,
or its parent's, takes every worker along. A sandbox wraps this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

STATUS = struct.Struct("<i")
PR_SET_PDEATHSIG = 1
MAX_FILE = 256 << 20  # bytes of a file that a worker may write


def serve(descriptor: int, settings: dict[str, Any]) -> NoReturn:
    """The whole life of the process; ``settings``: ``taught`` and ``warm`` modules."""
    from dlo_lib.grading.withheld import withhold

    withhold(settings["taught"])
    _warm(settings["warm"])
    control = socket.socket(fileno=descriptor)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()
    workers: dict[int, int] = {}
    with contextlib.suppress(OSError):
        control.send(b"ready")
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _reap(workers)
        if control.fileno() in ready:
            message, descriptors, *_ = socket.recv_fds(control, 1 << 16, 2)
            if not message:  # the judge is gone
                for pid in workers:
                    _kill_group(pid)
                os._exit(0)
            _fork(control, json.loads(message), descriptors, workers, (descriptor, woken, wake))


def _warm(modules: list[str]) -> None:
    """Import all that workers will need, and the parts of torch that it imports on first use."""
    import torch

    torch.set_num_threads(1)
    importlib.import_module("dlo_lib.grading.worker").prepare()
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.Adam([parameter]).step()  # but never a backward: autograd's threads do not survive a fork
    for name in modules:
        with contextlib.suppress(Exception):  # the cell that imports it will say what is wrong
            importlib.import_module(name)


def _fork(control: socket.socket, job: dict[str, Any], descriptors: list[int], workers: dict[int, int], inherited: tuple[int, ...]) -> None:
    channel, status = descriptors
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (*inherited, status, *workers.values()):
                os.close(other)
            _lock_down(job, zygote)
            from dlo_lib.grading.worker import serve as work

            work(socket.socket(fileno=channel))
        finally:
            os._exit(0)
    workers[pid] = status
    os.close(channel)
    handle = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        socket.send_fds(control, [str(pid).encode()], [handle])
    os.close(handle)


def _lock_down(job: dict[str, Any], zygote: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        os._exit(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.chdir(job["folder"])
    os.environ["HOME"] = job["folder"]
    sys.path.insert(0, job["folder"])  # as in a notebook: what lies beside it can be imported
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    # The judge kills beyond ``memory``; this stops what would be faster than its look.
    most = data_bytes() + 2 * job["memory"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def data_bytes() -> int:
    """Private writable memory of this process, mapped or not."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _reap(workers: dict[int, int]) -> None:
    while workers:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        _kill_group(ended.si_pid)  # what it started; its number is still its own, for it is not reaped yet
        pid, status = os.waitpid(ended.si_pid, 0)
        if (pipe := workers.pop(pid, None)) is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
