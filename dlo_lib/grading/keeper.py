"""The process between the zygote and a worker: it makes the worker's room, starts it, and tells the judge how it ended.

In a sandbox it is the first process of the worker's pid namespace: its end, or the judge's, is the end of everything in there, however
often it forked or called ``setsid``. Without one it adopts what the worker leaves behind, and ends that too. Neither runs student's code.
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

from dlo_lib.grading import lockdown, seccomp
from dlo_lib.grading.limits import Limits, descendants

REAP_MILLISECONDS = 1000  # between two looks for orphans that have ended


@dataclass(frozen=True)
class Job:
    """What the judge asks for. ``folder`` is the worker's own, made by the keeper in a sandbox, by the judge without one."""

    folder: str
    limits: Limits

    def packed(self) -> bytes:
        """As JSON."""
        return json.dumps({"folder": self.folder, "limits": vars(self.limits)}).encode()


def unpacked(message: bytes) -> Job:
    """The job in ``message``."""
    values = json.loads(message)
    return Job(values["folder"], Limits(**values["limits"]))


def start_confined(job: Job, channel: int, status: int, room: dict[str, Any]) -> NoReturn:
    """In a child of the zygote, the first process of its namespaces: keep a worker there. What fails is told on ``status``."""
    with _telling(status):
        lockdown.map_ids(room["user"], room["group"])
        os.setsid()
        lockdown.furnish(job.limits, room["keep"])
        _fill(room["files"], job.folder)
        _keep(job, channel, status, confined=True)
    os._exit(1)


def start_plain(job: Job, channel: int, status: int, room: dict[str, Any]) -> NoReturn:
    """In a child of the zygote: keep a worker that nothing holds but its limits."""
    with _telling(status):
        os.setsid()
        lockdown.prctl(lockdown.PR_SET_CHILD_SUBREAPER, 1)
        _fill(room["files"], job.folder)
        _keep(job, channel, status, confined=False)
    os._exit(1)


def _keep(job: Job, channel: int, status: int, confined: bool) -> NoReturn:
    line = socket.socket(fileno=status)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        line.detach()
        os.close(status)
        _work(job, channel, confined)
    os.close(channel)
    if confined:
        lockdown.give_up_privileges()
    worker, myself = os.pidfd_open(pid), os.pidfd_open(os.getpid())
    with contextlib.suppress(OSError):
        socket.send_fds(line, [b"up"], [myself if confined else worker, myself])
    ended = _wait(pid, worker, line)
    if ended is not None:
        with contextlib.suppress(OSError):
            line.send(json.dumps(ended).encode())
    if not confined:
        _end_all()
    os._exit(0)


def _wait(pid: int, worker: int, line: socket.socket) -> dict[str, float] | None:
    """How the worker ended: ``code`` as subprocess has it; None when the judge was gone first."""
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


def _work(job: Job, channel: int, confined: bool) -> NoReturn:
    try:
        if not confined:
            os.setsid()
            lockdown.prctl(lockdown.PR_SET_PDEATHSIG, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(job.folder)
        os.environ["HOME"] = job.folder
        sys.path.insert(0, job.folder)  # as in a notebook: what lies beside it can be imported
        from dlo_lib.grading.worker import serve

        job.limits.apply()
        if confined:
            job.limits.apply_tasks()
            lockdown.prctl(lockdown.PR_SET_DUMPABLE, 1)  # its own memory is its own to look at
            lockdown.give_up_privileges()
            seccomp.install()
        serve(socket.socket(fileno=channel))
    finally:
        os._exit(0)


def _fill(files: str, folder: str) -> None:
    if os.path.isdir(files):
        shutil.copytree(files, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)


def _end_all() -> None:
    """End all that the worker started; what lost its parent is this process's child by now."""
    while pids := list(descendants(os.getpid())):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


@contextlib.contextmanager
def _telling(status: int) -> Iterator[None]:
    """Tell the judge what goes wrong before the worker is up."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001  it must not run on into the zygote's loop
        with contextlib.suppress(OSError):
            os.write(status, f"no {type(error).__name__}: {error}".encode())
