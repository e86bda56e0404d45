"""The process between the zygote and a worker: it prepares the worker's file systems, starts the worker, and
reports its exit status to the judge.

In a sandbox the supervisor is the first process of the worker's pid namespace. When it or the judge ends, the
kernel kills all processes of the namespace, also those that forked twice or called ``setsid``. Without a
sandbox the supervisor adopts orphans of the worker and kills them at the end. It runs no student's code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from dlo_lib.grading.sandbox import lockdown, seccomp
from dlo_lib.grading.sandbox.limits import Limits, descendants

REAP_MILLISECONDS = 1000  # between two checks for orphans that have ended


@dataclass(frozen=True)
class WorkerRequest:
    """The judge's request for a worker.

    Args:
        folder: the working directory; the supervisor creates it in a sandbox, the judge without one.
        limits: the limits of the worker.
    """

    folder: str
    limits: Limits

    def to_json(self) -> bytes:
        """Return the request as JSON."""
        return json.dumps({"folder": self.folder, "limits": vars(self.limits)}).encode()


def parse_request(message: bytes) -> WorkerRequest:
    """Return the request in ``message``."""
    values = json.loads(message)
    return WorkerRequest(values["folder"], Limits(**values["limits"]))


def start_confined(request: WorkerRequest, channel: int, status: int, workspace: dict[str, Any]) -> NoReturn:
    """Run a confined worker. This process is a child of the zygote and the first process of its namespaces.

    Errors are reported on ``status``.
    """
    with _reporting_errors(status):
        lockdown.map_ids(workspace["user"], workspace["group"])
        os.setsid()
        lockdown.mount_worker_files(request.limits, workspace["keep"])
        _copy_files(workspace["files"], request.folder)
        _supervise(request, channel, status, confined=True)
    os._exit(1)


def start_plain(request: WorkerRequest, channel: int, status: int, workspace: dict[str, Any]) -> NoReturn:
    """Run a worker without confinement, only with limits. This process is a child of the zygote."""
    with _reporting_errors(status):
        os.setsid()
        lockdown.prctl(lockdown.PR_SET_CHILD_SUBREAPER, 1)
        _copy_files(workspace["files"], request.folder)
        _supervise(request, channel, status, confined=False)
    os._exit(1)


def _supervise(request: WorkerRequest, channel: int, status: int, confined: bool) -> NoReturn:
    line = socket.socket(fileno=status)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        line.detach()
        os.close(status)
        _run_worker(request, channel, confined)
    os.close(channel)
    if confined:
        lockdown.drop_privileges()
    worker, myself = os.pidfd_open(pid), os.pidfd_open(os.getpid())
    with contextlib.suppress(OSError):
        socket.send_fds(line, [b"up"], [myself if confined else worker, myself])
    ended = _wait_for_worker(pid, worker, line)
    if ended is not None:
        with contextlib.suppress(OSError):
            line.send(json.dumps(ended).encode())
    if not confined:
        _kill_descendants()
    os._exit(0)


def _wait_for_worker(pid: int, worker: int, line: socket.socket) -> dict[str, float] | None:
    """Return how the worker ended, with ``code`` as in subprocess; None if the judge ended first."""
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    poll.register(line.fileno(), select.POLLHUP)
    while True:
        ready = dict(poll.poll(REAP_MILLISECONDS))
        if line.fileno() in ready:
            return None
        while (state := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
            if state.si_pid == pid:
                return {"code": state.si_status if state.si_code == os.CLD_EXITED else -state.si_status}


def _run_worker(request: WorkerRequest, channel: int, confined: bool) -> NoReturn:
    try:
        if not confined:
            os.setsid()
            lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request.folder)
        os.environ["HOME"] = request.folder
        sys.path.insert(0, request.folder)  # as in a notebook: files beside it can be imported
        from dlo_lib.grading.sandbox.worker import serve

        request.limits.apply()
        if confined:
            request.limits.apply_tasks()
            lockdown.prctl(lockdown.PR_SET_DUMPABLE, 1)  # a worker may read its own /proc
            lockdown.drop_privileges()
            seccomp.install()
        serve(socket.socket(fileno=channel))
    finally:
        os._exit(0)


def _copy_files(files: str, folder: str) -> None:
    if os.path.isdir(files):
        shutil.copytree(files, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)


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
