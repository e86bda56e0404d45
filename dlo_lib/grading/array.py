"""A class judged by an array of jobs on a cluster, with this process as the one writer.

    queue of submissions  ->  elements, each with a judging service, on nodes of their own  ->  report files  ->  rows, here

Elements take submissions one at a time, so that a long one holds up no other: the whole takes (work / elements + the longest) at most, and
what an element needs to start. One that is preempted, lost or killed goes back into SLURM's queue, begins with what it had
taken, and each submission becomes one row. Before the array is submitted it is proved here that the reference solution scores full marks.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

from dlo_lib.errors import UserError
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.element import write_settings
from dlo_lib.grading.judging import Job, JudgingService
from dlo_lib.grading.service import TO_BE_JUDGED
from dlo_lib.grading.work_queue import WorkQueue
from dlo_lib.text import tr

QUEUE = "array-"  # how the folder of a queue begins, in that of the lab's grades
MOST_TURNS = 4  # of one element
MOST_STRIKES = 2  # elements that a submission may take down with it


class End(Enum):
    """How an element is over."""

    WELL = "it came to its end"
    LOST = "killed, preempted, out of time, or with its node"
    CANCELLED = "by somebody who wants it no more"


class Elements(Protocol):
    """The elements of a submitted array."""

    def ended(self) -> dict[int, End]:
        """Those that do not run and will not begin by themselves. Asks the cluster, once."""
        ...

    def pace(self) -> float:
        """Seconds between two such questions."""
        ...

    def again(self, element: int) -> None:
        """Put one that is over back into the queue of the cluster."""
        ...

    def last_words(self, element: int) -> str:
        """The last line that it has printed."""
        ...

    def cancel(self) -> None:
        """End those that run, and take back those that wait."""
        ...


Start = Callable[[Sequence[str], int], Elements]
"""Submits a command, to which ``--element N`` is added, as an array of so many elements."""


class ArrayOfJudges:
    """As ``JudgingService``, for a whole class: ``elements`` judging services on the nodes of a cluster.

    Args:
        start: submits the array.
    """

    def __init__(self, lab: LabInfo, course: Path, start: Start, elements: int, *, unsafe: bool = False) -> None:
        self.lab, self.unsafe = lab, unsafe
        self._course, self._start, self._elements = course.resolve(), start, elements
        self._grades = self._course / "grades" / lab.directory

    def looked_at(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, int]]:
        """Each job, as one to be judged: the elements look for themselves."""
        for job in jobs:
            yield job, TO_BE_JUDGED

    def judged(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, int]]:
        """Each job with its exit status, as they end: 0 when its report is written.

        Raises:
            UserError: the reference solution does not score full marks, SLURM refuses the array, somebody has cancelled it, or
                its elements do not stay alive.
        """
        waiting = list(jobs)
        with JudgingService(self.lab, self._course, self.unsafe) as service:
            service.prove()
        for left in self._grades.glob(f"{QUEUE}*"):  # of a batch that was killed; its elements end when they find nothing there
            WorkQueue(left).remove()
        queue = WorkQueue.of(self._grades / f"{QUEUE}{secrets.token_hex(4)}", waiting)
        write_settings(queue, self.lab, self._course, self.unsafe)
        try:
            started = min(self._elements, len(waiting))
            elements = self._start([sys.executable, "-m", "dlo_lib.grading.element", str(queue.folder)], started)
            try:
                yield from collected(queue, elements, started, waiting)
            finally:
                elements.cancel()
        finally:
            queue.remove()


def collected(queue: WorkQueue, elements: Elements, started: int, jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
    """The ``jobs`` of a queue with their exit statuses, as the ``started`` elements end them; lost elements are sent again, cancelled ones
    leave what they had to the others.

    Raises:
        UserError: somebody has cancelled the array, or no element stays alive.
    """
    waiting, turns, strikes, given_up = dict(enumerate(jobs)), Counter(range(started)), Counter[int](), set[int]()
    while waiting:
        over = elements.ended()  # before the look at what is finished: the last one of an element is there when that is over
        for number, code in list(queue.finished()):
            if (job := waiting.pop(number, None)) is not None:
                yield job, code
        if waiting and len(over) == started and set(over.values()) - {End.WELL} == {End.CANCELLED}:
            raise UserError(tr("the array was cancelled: the same command with --resume judges the other {count}", count=len(waiting)))
        for element in (element for element, end in over.items() if end is End.CANCELLED and element not in given_up):
            given_up.add(element)
            queue.give_back(element)
        lost = [element for element, end in over.items() if end is End.LOST and element not in given_up]
        for element in lost:
            for number in queue.held_by(element):
                strikes[number] += 1
                if strikes[number] == MOST_STRIKES:
                    queue.give_up(element, number)
            if turns[element] == MOST_TURNS:
                given_up.add(element)
                queue.give_back(element)
            else:
                turns[element] += 1
                elements.again(element)
        if len(over) == started and not lost and waiting.keys() - dict(queue.finished()).keys():  # nobody runs, and there is work
            able = next((element for element in over if element not in given_up and turns[element] < MOST_TURNS), None)
            if able is None:
                words = elements.last_words(next(iter(over)))
                text = (
                    "no element of the array stays alive ({words}): mend that, and the same command with --resume judges the other {count}"
                )
                raise UserError(tr(text, words=words, count=len(waiting)))
            turns[able] += 1
            elements.again(able)
        if waiting:
            time.sleep(elements.pace())
