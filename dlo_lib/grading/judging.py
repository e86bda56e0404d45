"""The asking side of the judging service: start it, hand it submissions, several at once, and collect what became of them.

What a batch and nbgrader's own commands have in common. A service that dies is started again, so that a zygote killed from outside costs
time and no row; a submission whose judge dies twice is a ``GRADER_ERROR``.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from dlo_lib.errors import UserError
from dlo_lib.grading.course import LabInfo, source_folder
from dlo_lib.text import tr

STARTS = 4  # of the service, for one batch
SECRET_FILE = "secret"  # in the course's folder: what the inputs of all checks are drawn from
LOG_FILE = "dlo-grade.log"  # in the course's folder
RECORD_FILE = "proved"  # in the folder of the lab's grades
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}  # a process that forks has one thread and no GPU


@dataclass(frozen=True)
class Job:
    """A submission to judge: where its notebook should be, the file for its report, and the report's key."""

    student: str
    notebook: Path
    report: Path
    key: str

    @property
    def rebuilt(self) -> Path:
        """The file for the notebook as it was judged."""
        return self.report.with_suffix(".ipynb")


def read_secret(course: Path) -> str:
    """The class secret of the course in ``course``."""
    return (course / SECRET_FILE).read_text(encoding="ascii").strip()


class Judges(Protocol):
    """Who judges the submissions of a batch."""

    def looked_at(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, int]]:
        """Each job with 0 when there was nothing to run and its report is written, 3 when it is to be judged."""
        ...

    def judged(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, int]]:
        """Each job with its exit status, as they end: 0 when its report is written."""
        ...


class Gone(Exception):
    """The service has ended."""


def begun(lab: LabInfo, course: Path, unsafe: bool = False) -> JudgingService | None:
    """A judging service that starts while its maker does other things; None where there is no course, which who grades it will say."""
    return JudgingService(lab, course.resolve(), unsafe) if (course / SECRET_FILE).is_file() else None


class JudgingService:
    """A judging service for ``lab`` in the course of the folder ``course``. A context manager: at its end no process is left.

    It takes seconds to start, which its maker can use: only the first answer is waited for.

    Args:
        unsafe: do without a sandbox.
    """

    def __init__(self, lab: LabInfo, course: Path, unsafe: bool = False) -> None:
        self.lab, self.unsafe = lab, unsafe
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

    def looked_at(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, int]]:
        """Each job with its exit status, as they end: 0 when there was nothing to run and its report is written, 3 when there is."""
        yield from self._run("look", jobs, at_once, alone=False)

    def judged(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, int]]:
        """Each job with its exit status, as they end: 0 when its report is written.

        Raises:
            UserError: the reference solution does not score full marks.
        """
        self.prove()
        yield from self._run("judge", jobs, at_once, alone=at_once == 1)

    @property
    def alive(self) -> bool:
        """It can be asked."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        self._line.close()
        if self._owner != os.getpid():
            return
        self._process.terminate()  # it may still be importing
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> JudgingService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._starts += 1
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[2])
        begin = f"import json, sys; sys.path.insert(0, {root!r}); from dlo_lib.grading.quick import leave_grammars_out"
        begin += "; leave_grammars_out(); from dlo_lib.grading.service import serve"
        with theirs, open(self._log, "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                # The secret goes through a pipe: a command line can be read by every user of the machine.
                [sys.executable, "-c", f"{begin}; serve({theirs.fileno()}, json.load(sys.stdin))"],
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

    def prove(self) -> None:
        """Know that the reference solution scores full marks: from the record, else it is judged, and that is recorded.

        Raises:
            UserError: it does not.
        """
        while True:
            try:
                self._send({"do": "ready"})
                lost = self._receive()["ready"]
                break
            except Gone:
                self._start_again()
        if lost:
            text = tr(
                "the reference solution of {lab} does not score full marks ({lost}): mend it, then grade",
                lab=self.lab.directory,
                lost=lost,
            )
            raise UserError(text)

    def _run(self, what: str, jobs: Iterable[Job], at_once: int, alone: bool) -> Iterator[tuple[Job, int]]:
        waiting: deque[tuple[Job, bool]] = deque((job, False) for job in jobs)
        running: dict[int, tuple[Job, bool]] = {}
        number = 0
        while waiting or running:
            try:
                while waiting and len(running) < at_once:
                    number += 1
                    running[number] = waiting.popleft()
                    job = running[number][0]
                    files = {name: str(getattr(job, name)) for name in ("notebook", "report", "rebuilt")}
                    self._send({"do": what, **files, "key": job.key, "alone": alone, "tag": number})
                answer = self._receive()
            except Gone:
                self._start_again()
                if what == "judge":
                    self.prove()
                waiting.extendleft(reversed(running.values()))
                running.clear()
                continue
            job, again = running.pop(answer["tag"])
            if answer["code"] in (0, 3):
                yield job, answer["code"]
            elif again:
                yield job, 1
            else:
                waiting.append((job, True))

    def _start_again(self) -> None:
        self.close()
        if self._starts >= STARTS:
            raise UserError(tr("the judging service does not stay alive: see {log}", log=self._log))
        self._start()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._line.send(json.dumps(message).encode())
        except OSError:
            raise Gone from None

    def _receive(self) -> dict[str, Any]:
        select.select([self._line], [], [])
        try:
            message = self._line.recv(1 << 16)
        except OSError:
            message = b""
        if not message:
            raise Gone
        return json.loads(message)
