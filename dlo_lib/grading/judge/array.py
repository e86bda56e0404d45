"""Judge a class with a job array on a cluster. This process is the only writer of the gradebook.

    queue of submissions  ->  elements, each with a judging service  ->  report files  ->  rows, here

An element takes one submission at a time, so that a long one does not delay the others. The whole array takes
at most (work / elements + the longest submission), plus the start of an element. An element that is
preempted, lost or killed is requeued in SLURM and first judges the submissions it had already taken; each
submission becomes one row. If the cluster does not start it again, the others judge them. Before the array
is submitted, this process proves that the reference solution scores full marks.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

from dlo_lib.base.errors import UserError
from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.text import tr
from dlo_lib.grading.judge.array_element import write_settings
from dlo_lib.grading.judge.client import (
    NEEDS_JUDGE,
    RECORD_FILE,
    JudgeClient,
    JudgeJob,
    Waiting,
    read_secret,
)
from dlo_lib.grading.judge.proof_record import ProofRecord
from dlo_lib.grading.judge.report_store import lab_key
from dlo_lib.grading.judge.work_queue import WorkQueue
from dlo_lib.grading.lab.course import LabInfo, source_folder
from dlo_lib.grading.lab.source import read_lab
from dlo_lib.grading.sandbox.isolation import required_isolation

QUEUE = "array-"  # prefix of a queue's folder in the folder of the lab's grades
MAX_STARTS = 4  # of one element
MAX_LOSSES = 2  # elements that may be lost while they judge the same submission
MAX_REFUSALS = 3  # of the cluster, to start an element again


class JudgesStopped(UserError):
    """The judges ended before every submission was judged; the rows of the others stand."""


class ElementEnd(Enum):
    """How an element ended."""

    FINISHED = "finished"
    LOST = "killed, preempted, out of time, or lost with its node"
    CANCELLED = "cancelled by the user"


class Elements(Protocol):
    """The elements of a submitted array."""

    def ended(self) -> dict[int, ElementEnd]:
        """Return the elements that have ended and that SLURM does not requeue; asks the cluster once."""
        ...

    def pace(self) -> float:
        """Return the seconds to wait between two calls of :meth:`ended`."""
        ...

    def requeue(self, element: int) -> None:
        """Put an ended element into the queue of the cluster again.

        Raises:
            UserError: the cluster refuses, or does not answer now.
        """
        ...

    def last_line(self, element: int) -> str:
        """Return the last line that an element has printed."""
        ...

    def cancel(self) -> None:
        """Cancel all running and waiting elements."""
        ...

    def cancel_waiting(self) -> None:
        """Cancel the elements that do not run yet; the others end by themselves, because no work is left."""
        ...


Start = Callable[[Sequence[str], int], Elements]
"""Submits a command, with ``--element N`` appended, as an array of the given number of elements."""


class ArrayOfJudges:
    """Judges a class as ``JudgeClient`` does, with ``elements`` judging services on the nodes of a cluster.

    Args:
        start: submits the array.
    """

    def __init__(
        self, lab: LabInfo, course: Path, start: Start, elements: int, *, unsafe: bool = False
    ) -> None:
        self.lab, self.unsafe = lab, unsafe
        self._course, self._start, self._elements = course.resolve(), start, elements
        self._grades = self._course / "grades" / lab.directory

    def screen(self, jobs: Iterable[JudgeJob], at_once: int) -> Iterator[tuple[JudgeJob, int]]:
        """Yield each job as one to judge; the elements screen the submissions."""
        for job in jobs:
            yield job, NEEDS_JUDGE

    def judge(
        self, jobs: Iterable[JudgeJob], at_once: int, waiting: Waiting | None = None
    ) -> Iterator[tuple[JudgeJob, int]]:
        """Yield each job with its exit status, 0 if its report is written, in the order in which they end.

        Raises:
            UserError: the reference solution does not score full marks, SLURM refuses the array, the user has
                cancelled it, or its elements do not stay alive.
        """
        todo = list(jobs)
        if not self._on_record():
            with JudgeClient(self.lab, self._course, self.unsafe) as service:
                service.prove(waiting)
        for left in self._grades.glob(f"{QUEUE}*"):  # of a killed batch: its elements end without a queue
            WorkQueue(left).remove()
        queue = WorkQueue.of(self._grades / f"{QUEUE}{secrets.token_hex(4)}", todo)
        write_settings(queue, self.lab, self._course, self.unsafe)
        try:
            started = min(self._elements, len(todo))
            elements = self._start(
                trusted_python(
                    "from dlo_lib.grading.judge.array_element import run; run()",
                    str(queue.folder),
                    library_of_job=True,
                ),
                started,
            )
            try:
                yield from collect_results(queue, elements, started, todo, waiting)
            except BaseException:
                elements.cancel()
                raise
            elements.cancel_waiting()
        finally:
            queue.remove()

    def _on_record(self) -> bool:
        """Return whether an earlier batch has proved that the reference solution scores full marks."""
        secret = read_secret(self._course)
        sandbox = "none" if self.unsafe else required_isolation().name
        key = lab_key(read_lab(source_folder(self.lab)), secret, sandbox)
        return ProofRecord(self._grades / RECORD_FILE, key, secret).stands()


def collect_results(
    queue: WorkQueue,
    elements: Elements,
    started: int,
    jobs: Sequence[JudgeJob],
    waiting: Waiting | None = None,
) -> Iterator[tuple[JudgeJob, int]]:
    """Yield the ``jobs`` of a queue with their exit statuses, in the order in which they end.

    A lost element is requeued. The submissions of a cancelled one, and of one that the cluster does not start
    again, go to the other elements.

    Raises:
        JudgesStopped: the user has cancelled the array, or no element stays alive.
    """
    todo = dict(enumerate(jobs))
    began: dict[int, float] = {}
    losses, given_up = Counter[int](), set[int]()
    restarts = _Restarts(elements, started)
    while todo:
        over = elements.ended()  # first: an element that has ended has finished its last submission before
        for number, code in list(queue.finished()):
            if (job := todo.pop(number, None)) is not None:
                yield job, code
        failures = set(over.values()) - {ElementEnd.FINISHED}
        if todo and len(over) == started and failures == {ElementEnd.CANCELLED}:
            text = "the array was cancelled: the same command with --resume judges the other {count}"
            raise JudgesStopped(tr(text, count=len(todo)))
        in_use = {element: end for element, end in over.items() if element not in given_up}
        for element in (element for element, end in in_use.items() if end is ElementEnd.CANCELLED):
            given_up.add(element)
            queue.release(element)
        lost = [element for element, end in in_use.items() if end is ElementEnd.LOST]
        for element in lost:
            for number in queue.taken_by(element) if not restarts.waits(element) else ():
                losses[number] += 1
                if losses[number] == MAX_LOSSES:
                    queue.mark_failed(element, number)
            if not restarts.start(element):
                given_up.add(element)
                queue.release(element)
        if len(over) == started and not lost and todo.keys() - dict(queue.finished()).keys():
            # Work is left and no element runs.
            candidates = (element for element in over if element not in given_up)
            able = next((element for element in candidates if restarts.start(element)), None)
            if able is None:
                words = restarts.refusal or elements.last_line(next(iter(over)))
                text = (
                    "no element of the array stays alive ({words}): correct the cause; "
                    "then the same command with --resume judges the other {count}"
                )
                raise JudgesStopped(tr(text, words=words, count=len(todo)))
        if todo:
            if waiting is not None:
                now = time.monotonic()
                taken = [number for element in range(started) for number in queue.taken_by(element)]
                waiting({jobs[number].student: now - began.setdefault(number, now) for number in taken})
            time.sleep(elements.pace())


class _Restarts:
    """How often each element was started, and the refusals to start it again.

    ``refusal`` is the last one, in words.
    """

    def __init__(self, elements: Elements, started: int) -> None:
        self._elements = elements
        self._starts, self._refused = Counter(range(started)), Counter[int]()
        self.refusal = ""

    def waits(self, element: int) -> bool:
        """Whether the cluster has refused to start the element, and will be asked again."""
        return 0 < self._refused[element] < MAX_REFUSALS

    def start(self, element: int) -> bool:
        """Ask the cluster to start an ended element; return False if it does not run again."""
        if self._starts[element] == MAX_STARTS or self._refused[element] == MAX_REFUSALS:
            return False
        try:
            self._elements.requeue(element)
        except UserError as error:
            self._refused[element] += 1
            self.refusal = str(error)
            return self.waits(element)
        self._starts[element] += 1
        self._refused[element] = 0
        return True
