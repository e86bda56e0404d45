"""The process that runs jobs on this machine: one job after another, one element after another.

It belongs to the process that submitted the job: when that process ends for any reason, the runner stops what
it runs and ends too, so no process is left. On Linux it also reaps all processes that its jobs start, and
ends those that they leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from dlo_lib.base.locks import file_lock
from dlo_lib.cluster.job.handle import Job
from dlo_lib.cluster.run.dependency import Dependency
from dlo_lib.cluster.run.records import SCRIPT, jobs_dir, mark

_POLL_S = 0.2
_GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class _Stopped(BaseException):
    """The runner must end."""


class Runner:
    """The process that ``local.start`` starts for some elements of one job."""

    def __init__(self, folder: Path, after: Dependency | None, parent: int) -> None:
        self._folder, self._after, self._parent = folder, after, parent
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        raise _Stopped

    def run(self, elements: list[int]) -> None:
        """Run the elements one after another."""
        with contextlib.suppress(_Stopped):
            if self._after is not None:
                elements = self._wait_for(self._after, elements)
            with self._machine_lock():
                for element in elements:
                    self._element(element)

    def _wait_for(self, after: Dependency, elements: list[int]) -> list[int]:
        """Wait until the job in ``after`` has ended; return the elements that may run; mark the rest."""
        while not (before := Job(after.folder)).done:
            self._sleep()
        statuses = before.status()
        for element in elements:
            if not after.allows(statuses, element):
                mark(self._folder, "cancelled", element)
        return [element for element in elements if after.allows(statuses, element)]

    @contextlib.contextmanager
    def _machine_lock(self) -> Iterator[None]:
        lock = file_lock(jobs_dir() / "this-machine.lock")
        while True:
            try:
                lock.acquire(blocking=False)
                break
            except Timeout:
                self._sleep()
        try:
            yield
        finally:
            lock.release()

    def _element(self, element: int) -> None:
        (self._folder / "logs").mkdir(exist_ok=True)
        mark(self._folder, "begun", element)
        with (self._folder / "logs" / f"{element}.out").open("ab") as log:
            job = subprocess.Popen(
                ["bash", str(self._folder / SCRIPT)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "SLURM_ARRAY_TASK_ID": str(element)},
                start_new_session=True,
            )
        try:
            while job.poll() is None:
                self._sleep()
        except _Stopped:
            self._end(job)
            # A stopped script has no valid exit status.
            (self._folder / "ends" / str(element)).unlink(missing_ok=True)
            raise
        self._end(job)

    def _sleep(self) -> None:
        if os.getppid() != self._parent:
            raise _Stopped
        time.sleep(_POLL_S)

    def _end(self, job: subprocess.Popen[bytes]) -> None:
        """End the job and all its processes: SIGTERM, which torchrun forwards to its ranks, then SIGKILL."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        while job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        while left := _children():
            for child in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        signal.signal(signal.SIGTERM, self._stop)


def _children() -> list[int]:
    """Return the children of this process, including orphans that it reaps."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    """Run the elements that the arguments of this process name."""
    folder, after, kind, parent, *elements = sys.argv[1:]
    earlier = Dependency(Path(after), kind) if after else None
    Runner(Path(folder), earlier, int(parent)).run([int(element) for element in elements])
