"""The client of the judging service: it starts the service, sends submissions, several at once, and collects
their exit statuses.

Batches and the commands of nbgrader use it. A service that has ended is restarted, so that a zygote killed
from outside costs time but no row. A submission whose judge dies twice gets ``GRADER_ERROR``.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from dlo_lib.base.errors import UserError
from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.course import LabInfo, source_folder

STARTS = 4  # of the service, in one batch
NEEDS_JUDGE = 3  # exit status of a screening that found something to run
SECRET_FILE = "secret"  # in the course's folder: the class secret, the seed of the inputs of all checks
LOG_FILE = "dlo-grade.log"  # in the course's folder
RECORD_FILE = "proved"  # in the folder of the lab's grades: see ``proof_record``
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}  # a process that forks has one thread and no GPU


@dataclass(frozen=True)
class JudgeJob:
    """A submission to judge: the expected path of its notebook, the file of its report, and the
    report's key.
    """

    student: str
    notebook: Path
    report: Path
    key: str

    @property
    def rebuilt(self) -> Path:
        """The file of the rebuilt notebook, which shows what was judged."""
        return self.report.with_suffix(".ipynb")


def read_secret(course: Path) -> str:
    """Return the class secret of the course in ``course``."""
    return (course / SECRET_FILE).read_text(encoding="ascii").strip()


def no_course(folder: Path) -> UserError:
    """Return the error that says there is no course in ``folder``."""
    return UserError(f"no course in {folder}: make one with `dlo course {folder}`")


Waiting = Callable[[Mapping[str, float]], None]
"""Takes the students whose submissions are being judged, with the seconds since the start; empty while the
reference solution is judged.
"""


class Judges(Protocol):
    """A service that judges the submissions of a batch."""

    def screen(self, jobs: Iterable[JudgeJob], at_once: int) -> Iterator[tuple[JudgeJob, int]]:
        """Yield each job with 0 if there was nothing to run and its report is written, with 3 if it must be
        judged.
        """
        ...

    def judge(
        self, jobs: Iterable[JudgeJob], at_once: int, waiting: Waiting | None = None
    ) -> Iterator[tuple[JudgeJob, int]]:
        """Yield each job with its exit status, 0 if its report is written, in the order in which they end.

        Args:
            waiting: called about once a second while submissions are judged.
        """
        ...


class ServiceEnded(Exception):
    """The service has ended."""


def start_client(lab: LabInfo, course: Path, unsafe: bool = False) -> JudgeClient | None:
    """Start a judging service without waiting for it; return None without a course, which grading then
    reports.
    """
    return JudgeClient(lab, course.resolve(), unsafe) if (course / SECRET_FILE).is_file() else None


class JudgeClient:
    """A judging service for ``lab`` in the course of the folder ``course``. A context manager that ends the
    service.

    The service needs seconds to start. The constructor does not wait; the first answer does.

    Args:
        unsafe: judge without a sandbox.
    """

    def __init__(self, lab: LabInfo, course: Path, unsafe: bool = False) -> None:
        self.lab, self.course, self.unsafe = lab, course, unsafe
        self._settings = {
            "folder": str(source_folder(lab)),
            "secret": read_secret(course),
            "unsafe": unsafe,
            "record": str(course / "grades" / lab.directory / RECORD_FILE),
            "parent": os.getpid(),
        }
        self._log = course / LOG_FILE
        self._starts = 0
        self._owner = os.getpid()
        self._start()

    def screen(self, jobs: Iterable[JudgeJob], at_once: int) -> Iterator[tuple[JudgeJob, int]]:
        """Yield each job with its exit status in the order in which they end: 0 if there was nothing to run
        and its report is written, 3 if it must be judged.
        """
        yield from self._run("screen", jobs, at_once, alone=False, waiting=None)

    def judge(
        self, jobs: Iterable[JudgeJob], at_once: int, waiting: Waiting | None = None
    ) -> Iterator[tuple[JudgeJob, int]]:
        """Yield each job with its exit status, 0 if its report is written, in the order in which they end.

        Raises:
            UserError: the reference solution does not score full marks.
        """
        self.prove(waiting)
        yield from self._run("judge", jobs, at_once, at_once == 1, waiting)

    @property
    def alive(self) -> bool:
        """True if this process owns the service and the service runs."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the service."""
        return self._process.pid

    def close(self) -> None:
        """End the service."""
        self._line.close()
        if self._owner != os.getpid():
            return
        self._process.terminate()  # it may still be importing
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> JudgeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._starts += 1
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            "import json; from dlo_lib.grading.judge.server import serve\n"
            f"serve({theirs.fileno()}, json.load(sys.stdin))"
        )
        with theirs, open(self._log, "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                # The secret goes through a pipe: a command line can be read by every user of the machine.
                trusted_python(code, unbuffered=True),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(self._settings).encode())

    def prove(self, waiting: Waiting | None = None) -> None:
        """Check that the reference solution scores full marks: read the record, or judge the solution and
        record it.

        Raises:
            UserError: the reference solution does not score full marks.
        """
        while True:
            try:
                self._send({"do": "ready"})
                lost = self._receive(partial(waiting, {}) if waiting else None)["ready"]
                break
            except ServiceEnded:
                self._start_again()
        if lost:
            text = tr(
                "the reference solution of {lab} does not score full marks ({lost}): correct it, then grade",
                lab=self.lab.directory,
                lost=lost,
            )
            raise UserError(text)

    def _run(
        self,
        what: str,
        jobs: Iterable[JudgeJob],
        at_once: int,
        alone: bool,
        waiting: Waiting | None,
    ) -> Iterator[tuple[JudgeJob, int]]:
        todo: deque[tuple[JudgeJob, bool]] = deque((job, False) for job in jobs)
        running: dict[int, tuple[JudgeJob, bool]] = {}
        began: dict[int, float] = {}
        number = 0

        def tick() -> None:
            if waiting is not None:
                now = time.monotonic()
                waiting({job.student: now - began[tag] for tag, (job, _) in running.items()})

        while todo or running:
            try:
                while todo and len(running) < at_once:
                    number += 1
                    running[number], began[number] = todo.popleft(), time.monotonic()
                    job = running[number][0]
                    files = {name: str(getattr(job, name)) for name in ("notebook", "report", "rebuilt")}
                    self._send({"do": what, **files, "key": job.key, "alone": alone, "tag": number})
                tick()
                answer = self._receive(tick)
            except ServiceEnded:
                self._start_again()
                if what == "judge":
                    self.prove()
                todo.extendleft(reversed(running.values()))
                running.clear()
                continue
            job, again = running.pop(answer["tag"])
            if answer["code"] in (0, NEEDS_JUDGE):
                yield job, answer["code"]
            elif again:
                yield job, 1
            else:
                todo.append((job, True))

    def _start_again(self) -> None:
        self.close()
        if self._starts >= STARTS:
            raise UserError(tr("the judging service does not stay alive: see {log}", log=self._log))
        self._start()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._line.send(json.dumps(message).encode())
        except OSError:
            raise ServiceEnded from None

    def _receive(self, tick: Callable[[], None] | None = None) -> dict[str, Any]:
        while not select.select([self._line], [], [], 1.0)[0]:
            if tick is not None:
                tick()
        try:
            message = self._line.recv(1 << 16)
        except OSError:
            message = b""
        if not message:
            raise ServiceEnded
        return json.loads(message)
