"""A process that forks the student's processes, so that torch is imported once and each starts in
milliseconds.

Before its first worker, the zygote collapses its memory into huge pages (``base.huge_pages``), which makes a
fork three times as cheap. It has one thread, runs no student's code, and blocks what the lab teaches before
it imports anything. A request is a datagram with two descriptors: the worker's end of the channel, and the
end of a socket on which the judge learns how the worker started and ended. When the judge closes its end of
that socket, the worker ends. When the zygote or its parent ends, all workers end. It runs inside the sandbox
of the host, if there is one, and sees no GPU, because a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from dlo_lib.base.garbage import without_collector
from dlo_lib.base.huge_pages import collapse
from dlo_lib.grading.sandbox import lockdown, seccomp, start
from dlo_lib.grading.switch.own_memory import load_driver, reserve_small_objects, return_free_memory

COMMON = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sympy", "tqdm")
THREADED = ("pyarrow",)  # pandas imports it if it can, and it starts threads, which do not survive a fork


def serve(descriptor: int, settings: dict[str, Any]) -> NoReturn:
    """Start workers until the judge ends.

    Args:
        descriptor: the zygote's end of the socket to the judge.
        settings: ``taught`` and ``warm`` modules, whether workers need torch's ``dynamo``, ``confined``, and
            the ``workspace`` of each worker.
    """
    from dlo_lib.grading.sandbox.blocked_imports import block_imports

    block_imports(settings["taught"])
    with without_collector():
        _warm(settings["warm"], settings["dynamo"])
    lockdown.prctl(lockdown.PR_SET_DUMPABLE, 0)
    seccomp.prepare()
    control = socket.socket(fileno=descriptor)
    confined = settings["confined"]
    fork = lockdown.fork_into_namespaces if confined else os.fork
    start_worker = start.start_confined if confined else start.start_plain
    files = start.read_files(settings["workspace"]["files"])
    settings["workspace"] |= {"user": os.getuid(), "group": os.getgid(), "files": files}
    workers = _Workers()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # In each fork, Python would renew the locks of all loggers, which overwrites 140 pages. The zygote has
    # one thread, which holds none of them.
    logging._at_fork_reinit_lock_weakset.clear()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    reserve_small_objects()
    for _ in collapse():  # not later: a worker that lives would be charged for the small pages
        pass
    return_free_memory()  # what a worker would fill, or release at a mark; collapse() has made it resident
    with contextlib.suppress(OSError):
        control.send(b"ready")
    workers.poll.register(control, select.POLLIN)
    workers.poll.register(woken, select.POLLIN)
    while True:
        ready = dict(workers.poll.poll())
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            workers.reap()
        workers.end_closed(ready)
        if control.fileno() in ready:
            message, descriptors, *_ = socket.recv_fds(control, 1 << 16, 2)
            if not message:  # the judge has ended: the supervisors see it too
                os._exit(0)
            request = start.parse_request(message)
            import_common(request.imports)
            try:
                pid = fork()
            except OSError as error:  # too many processes or too little memory: the judge may ask again
                os.write(descriptors[1], f"no {error}".encode())
                pid = -1
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (descriptor, woken, wake, *workers.lines):
                    os.close(inherited)
                channel, status = descriptors
                start_worker(request, channel, status, settings["workspace"])
            os.close(descriptors[0])
            if confined and pid > 0:
                workers.add(pid, descriptors[1])
            else:
                os.close(descriptors[1])


def _warm(modules: list[str], dynamo: bool) -> None:
    """Import the modules that workers need, with ``dynamo`` also what torch imports for the first optimizer,
    and rehearse the steps of a worker."""
    import torch

    torch.set_num_threads(1)
    load_driver()  # what it keeps is shared, and no worker's own
    worker = importlib.import_module("dlo_lib.grading.sandbox.worker")
    worker.prepare()
    if dynamo:
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.zeros(2)
        torch.optim.Adam([parameter]).step()  # no backward: autograd's threads do not survive a fork
    for name in modules:
        with contextlib.suppress(Exception):  # the cell that imports it reports the error
            importlib.import_module(name)
    importlib.import_module("dlo_lib.grading.sandbox.rehearsal").rehearse()
    worker.seed()  # last, because an import may draw random numbers


def import_common(names: Iterable[str]) -> None:
    """Import those of the modules that belong to ``COMMON`` packages, once for all workers.

    A process that imports pandas itself needs 2 s and 80 MiB, which would count as time and memory of the
    student, in each rank. Other modules are left to the worker: the zygote runs nothing that a student
    chooses.
    """
    new = [name for name in names if name.partition(".")[0] in COMMON and name not in sys.modules]
    hidden = [name for name in THREADED if name not in sys.modules]
    if not new:
        return
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # it cannot be imported
    for name in new:
        with contextlib.suppress(Exception):  # no such module; the cell that imports it reports the error
            importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]
    importlib.import_module("dlo_lib.grading.sandbox.worker").seed()
    gc.freeze()


class _Workers:
    """The confined workers that run, and the sockets on which the judge learns how they ended."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self.lines: dict[int, int] = {}  # descriptor of the socket → pid

    def add(self, pid: int, line: int) -> None:
        """Watch a worker that has just been forked."""
        self.lines[line] = pid
        self.poll.register(line, 0)  # only a hang-up

    def end_closed(self, ready: Mapping[int, int]) -> None:
        """Kill the workers whose judge has closed its end, or has ended."""
        for line in ready.keys() & self.lines.keys():
            os.kill(self.lines[line], signal.SIGKILL)  # not reaped yet, so the number is still the worker's
            self.poll.unregister(line)  # reap() closes it

    def reap(self) -> None:
        """Report the workers that have ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for line in [line for line, worker in self.lines.items() if worker == pid]:
                    with contextlib.suppress(KeyError):  # the judge had closed its end
                        self.poll.unregister(line)
                    del self.lines[line]
                    with socket.socket(fileno=line) as judge:
                        start.report_end(judge, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
