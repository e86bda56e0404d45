"""Start a worker in a fork of the zygote: prepare its files, set its limits, and run its loop.

In a sandbox the fork is the worker, and the first process of its pid namespace: when it ends, the kernel
kills all processes of the namespace, also those that forked twice or called ``setsid``. The kernel drops the
signals that such a process gets from its own namespace and has no handler for, so a cell cannot kill or stop
its worker with a signal (pid_namespaces(7)).

Without a sandbox the fork is a supervisor. It starts the worker, adopts the orphans of the worker, and kills
them at the end. It runs no student's code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dlo_lib.grading.sandbox import lockdown, seccomp
from dlo_lib.grading.sandbox.limits import Limits, descendants

REAP_MILLISECONDS = 1000  # between two checks for orphans that have ended
UP = b"up"  # the message with the pidfds of a worker that has run no cell yet


@dataclass(frozen=True)
class WorkerRequest:
    """The judge's request for a worker.

    Args:
        folder: the working directory; the worker creates it in a sandbox, the judge without one.
        limits: the limits of the worker.
        imports: modules that the cells import.
    """

    folder: str
    limits: Limits
    imports: Sequence[str] = ()

    def to_json(self) -> bytes:
        """Return the request as JSON."""
        values = {"folder": self.folder, "limits": vars(self.limits), "imports": list(self.imports)}
        return json.dumps(values).encode()


def parse_request(message: bytes) -> WorkerRequest:
    """Return the request in ``message``."""
    values = json.loads(message)
    return WorkerRequest(values["folder"], Limits(**values["limits"]), values["imports"])


def start_confined(request: WorkerRequest, channel: int, status: int, workspace: dict[str, Any]) -> NoReturn:
    """Run a confined worker in this process, a child of the zygote and the first process of its namespaces.

    Its pidfd is sent on ``status``, or an error. The zygote reports how it ended.
    """
    with _reporting_errors(status):
        lockdown.map_ids(workspace["user"], workspace["group"])
        os.setsid()
        lockdown.mount_worker_files(request.limits, workspace["keep"])
        _write_files(workspace["files"], request.folder)
        line = socket.socket(fileno=status)
        myself = os.pidfd_open(os.getpid())
        _prepare(request)
        request.limits.apply_tasks()
        with contextlib.suppress(OSError):
            socket.send_fds(line, [UP], [myself])
        os.close(myself)
        line.close()
        lockdown.prctl(lockdown.PR_SET_DUMPABLE, 1)  # a worker may read its own /proc
        lockdown.drop_privileges()
        seccomp.install(rank=request.limits.rank)
        _serve(channel)
    os._exit(1)


def start_plain(request: WorkerRequest, channel: int, status: int, workspace: dict[str, Any]) -> NoReturn:
    """Supervise a worker without confinement, only with limits. This process is a child of the zygote."""
    with _reporting_errors(status):
        os.setsid()
        lockdown.prctl(lockdown.PR_SET_CHILD_SUBREAPER, 1)
        _write_files(workspace["files"], request.folder)
        line = socket.socket(fileno=status)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pid = os.fork()
        if pid == 0:
            line.close()
            _run_plain(request, channel)
        os.close(channel)
        _supervise(pid, line)
    os._exit(1)


def _supervise(pid: int, line: socket.socket) -> NoReturn:
    worker, myself = os.pidfd_open(pid), os.pidfd_open(os.getpid())
    with contextlib.suppress(OSError):
        socket.send_fds(line, [UP], [worker, myself])
    code = _wait_for_worker(pid, worker, line)
    if code is not None:
        report_end(line, code)
    _kill_descendants()
    os._exit(0)


def report_end(line: socket.socket, code: int) -> None:
    """Tell the judge on ``line`` how a worker ended; ``code`` as in subprocess."""
    with contextlib.suppress(OSError):  # the judge has closed the worker
        line.send(json.dumps({"code": code}).encode())


def _wait_for_worker(pid: int, worker: int, line: socket.socket) -> int | None:
    """Return the exit code of the worker; None if the judge ended first."""
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    poll.register(line.fileno(), select.POLLHUP)
    while True:
        ready = dict(poll.poll(REAP_MILLISECONDS))
        if line.fileno() in ready:
            return None
        while (state := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
            if state.si_pid == pid:
                return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _run_plain(request: WorkerRequest, channel: int) -> NoReturn:
    try:
        os.setsid()
        lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
        _prepare(request)
        _serve(channel)
    finally:
        os._exit(0)


def _prepare(request: WorkerRequest) -> None:
    """Set what every worker has: no terminal, its folder, its limits."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.folder)
    os.environ["HOME"] = request.folder
    sys.path.insert(0, request.folder)  # as in a notebook: files beside it can be imported
    request.limits.apply()


def _serve(channel: int) -> NoReturn:
    try:
        from dlo_lib.grading.sandbox.worker import serve

        serve(socket.socket(fileno=channel))
    finally:
        os._exit(0)


def read_files(folder: str) -> dict[str, bytes]:
    """Return path → content of the files in ``folder``. The zygote reads them, so that no worker does."""
    return {
        os.path.relpath(os.path.join(place, name), folder): Path(place, name).read_bytes()
        for place, _, names in os.walk(folder)
        for name in names
    }


def _write_files(files: Mapping[str, bytes], folder: str) -> None:
    for name, content in files.items():
        path = os.path.join(folder, name)
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            file.write(content)


def _kill_descendants() -> None:
    """Kill all processes that the worker started; orphans are children of this process."""
    while pids := list(descendants(os.getpid())):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


@contextlib.contextmanager
def _reporting_errors(status: int) -> Iterator[None]:
    """Report an error to the judge until the worker runs."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001  this fork must not return to the zygote's loop
        with contextlib.suppress(OSError):
            os.write(status, f"no {type(error).__name__}: {error}".encode())
