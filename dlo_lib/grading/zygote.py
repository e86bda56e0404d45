"""A warm process that forks the student's processes: torch is imported once, so that each starts in milliseconds.

While nobody asks for a worker it gathers its memory into huge pages (``huge_pages``), which makes a fork three times as cheap.
It never runs a student's code itself, has one thread, and has what the lab teaches withheld from its beginning. Requests come as
datagrams with two descriptors, the worker's channel and the line on which its keeper tells how it does. Its own end, or its parent's, takes
every worker along. It runs inside the sandbox, where the host has one, and sees no GPU: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from dlo_lib.grading import keeper, lockdown, seccomp
from dlo_lib.grading.huge_pages import collapse


def serve(descriptor: int, settings: dict[str, Any]) -> NoReturn:
    """The whole life of the process; ``settings``: ``taught`` and ``warm`` modules, ``confined``, and the ``room`` of each worker."""
    from dlo_lib.grading.withheld import withhold

    withhold(settings["taught"])
    _warm(settings["warm"])
    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 0)
    seccomp.prepare()
    control = socket.socket(fileno=descriptor)
    fork, start = (lockdown.fork_into_namespaces, keeper.start_confined) if settings["confined"] else (os.fork, keeper.start_plain)
    settings["room"] |= {"user": os.getuid(), "group": os.getgid()}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):
        control.send(b"ready")
    gathering, more = collapse(), True
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [], 0 if more else None)
        if not ready:
            more = next(gathering, False)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _reap()
        if control.fileno() in ready:
            message, descriptors, *_ = socket.recv_fds(control, 1 << 16, 2)
            if not message:  # the judge is gone: the keepers see it too
                os._exit(0)
            try:
                pid = fork()
            except OSError as error:  # too many processes, or too little memory: the judge is told, and may ask again
                os.write(descriptors[1], f"no {error}".encode())
                pid = -1
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (descriptor, woken, wake):
                    os.close(inherited)
                channel, status = descriptors
                start(keeper.unpacked(message), channel, status, settings["room"])
            for handed_on in descriptors:
                os.close(handed_on)


def _warm(modules: list[str]) -> None:
    """Import all that workers will need, and the parts of torch that it imports on first use."""
    import torch

    torch.set_num_threads(1)
    worker = importlib.import_module("dlo_lib.grading.worker")
    worker.prepare()
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.Adam([parameter]).step()  # but never a backward: autograd's threads do not survive a fork
    for name in modules:
        with contextlib.suppress(Exception):  # the cell that imports it will say what is wrong
            importlib.import_module(name)
    worker.seed()  # last: an import may draw numbers


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
