"""The process that runs jobs on this machine: the elements of a job one after another, and one job after another.

It belongs to the process that submitted: when that has gone, however it went, the runner stops what it runs and goes too, so nothing is
left behind. On Linux it is also the reaper of all that its jobs start, and ends what they leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dlo_lib.cluster.job import Job
from dlo_lib.cluster.records import SCRIPT, jobs_dir, mark
from dlo_lib.cluster.states import State

_POLL_S = 0.2
_GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class _Stopped(BaseException):
    """The runner is to end."""


class Runner:
    """The process that ``local.start`` starts for some elements of one job."""

    def __init__(self, folder: Path, after: Path | None, parent: int) -> None:
        self._folder, self._after, self._parent = folder, after, parent
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        raise _Stopped

    def run(self, elements: list[int]) -> None:
        with contextlib.suppress(_Stopped):
            if self._after is not None and not self._has_completed(self._after):
                for element in elements:
                    mark(self._folder, "cancelled", element)
                return
            with self._my_turn():
                for element in elements:
                    self._element(element)

    def _has_completed(self, after: Path) -> bool:
        """Wait until that job is over."""
        while not (before := Job(after)).done:
            self._sleep()
        return all(status.state is State.COMPLETED for status in before.status())

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        with (jobs_dir() / "this-machine.lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._sleep()
            yield

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
            (self._folder / "ends" / str(element)).unlink(missing_ok=True)  # it was ended: that is not how it ends
            raise
        self._end(job)

    def _sleep(self) -> None:
        if os.getppid() != self._parent:
            raise _Stopped
        time.sleep(_POLL_S)

    def _end(self, job: subprocess.Popen[bytes]) -> None:
        """All that the job started has ended afterwards: first it is asked to, which torchrun passes on to its ranks."""
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
    """Of this process: with those whose own parents have ended, as it reaps them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    _folder, _after, _parent, *_elements = sys.argv[1:]
    Runner(Path(_folder), Path(_after) if _after else None, int(_parent)).run([int(element) for element in _elements])
