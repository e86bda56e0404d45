"""A class judged by an array: each submission once, whatever becomes of the elements, and the rows that one machine gives."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dlo_lib.errors import UserError
from dlo_lib.grading.array import MOST_STRIKES, MOST_TURNS, QUEUE, ArrayOfJudges, End, collected
from dlo_lib.grading.batch import Options, grade_lab
from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.element import work
from dlo_lib.grading.judging import Job, JudgingService
from dlo_lib.grading.work_queue import WorkQueue
from tests.grading.small_class import results, rows


def jobs(count: int) -> list[Job]:
    return [Job(f"s{number}", Path(f"/nowhere/{number}.ipynb"), Path(f"/nowhere/{number}.json"), "key") for number in range(count)]


def test_each_submission_is_taken_once_however_many_take(tmp_path: Path) -> None:
    queue, judged = WorkQueue.of(tmp_path / "queue", jobs(200)), []

    def element(number: int) -> None:
        work(WorkQueue(tmp_path / "queue"), number, lambda job: judged.append(job.student) or 0)

    threads = [threading.Thread(target=element, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(judged) == sorted(job.student for job in jobs(200))
    assert sorted(queue.finished()) == [(number, 0) for number in range(200)]


def test_an_element_that_runs_again_begins_with_what_it_had_taken(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    first = queue.take(4)
    assert first is not None
    assert first.job == jobs(3)[0]
    assert queue.take(5).number == 1
    assert WorkQueue(tmp_path / "queue").take(4) == first
    assert queue.held_by(4) == [0]


def test_what_is_given_back_is_anybodys(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(1))
    late = queue.take(0)
    assert not queue.anything_left_to(1)
    queue.give_back(0)
    assert queue.anything_left_to(1)
    assert queue.take(1).number == 0
    queue.finish(late, 0)  # the element was not lost after all: it is somebody else's by now
    assert list(queue.finished()) == []


def test_nobody_finds_more_when_the_queue_is_gone(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(2))
    ticket = queue.take(0)
    queue.remove()
    queue.finish(ticket, 0)
    assert queue.take(0) is None
    assert not (tmp_path / "queue").exists()


class Processes:
    """Elements as processes of this machine, which their end is told of."""

    def __init__(self, command: Sequence[str], elements: int) -> None:
        self.command, self.turns = command, [0] * elements
        self.running = [self._start(number) for number in range(elements)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        self.turns[number] += 1
        return subprocess.Popen([*self.command, "--element", str(number)])

    def ended(self) -> dict[int, End]:
        return {
            number: End.LOST if process.returncode else End.WELL
            for number, process in enumerate(self.running)
            if process.poll() is not None
        }

    def pace(self) -> float:
        return 0.05

    def last_words(self, element: int) -> str:
        return ""

    def again(self, element: int) -> None:
        self.running[element] = self._start(element)

    def cancel(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


class Mortal(Processes):
    """The first element is killed as soon as it holds a submission, once."""

    def ended(self) -> dict[int, End]:
        queue = WorkQueue(Path(self.command[-1]))
        if self.turns[0] == 1 and queue.held_by(0):
            self.running[0].kill()
            self.running[0].wait()
        return super().ended()


@pytest.fixture(scope="module")
def by_one_machine(in_checkout: Path, class_: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    course = tmp_path_factory.mktemp("one") / "course"
    shutil.copytree(class_, course, symlinks=True)
    info = find_lab("91", source_labs())
    with JudgingService(info, course, unsafe=True) as service:
        grade_lab(info, course, options=Options(jobs=2, unsafe=True), judges=service)
    return course


@pytest.fixture
def course(ungraded: Path) -> Path:
    return ungraded


@pytest.mark.slow
@pytest.mark.parametrize("elements", [Processes, Mortal])
def test_an_array_gives_the_rows_of_one_machine(by_one_machine: Path, course: Path, elements: type[Processes]) -> None:
    info, started = find_lab("91", source_labs()), []

    def start(command: Sequence[str], count: int) -> Processes:
        started.append(elements(command, count))
        return started[-1]

    judges = ArrayOfJudges(info, course, start, 2, unsafe=True)
    seen = []
    grade_lab(info, course, lambda row: seen.append(row.student), Options(unsafe=True), judges)
    assert results(course) == results(by_one_machine)
    assert rows(course / "gradebook.db") == rows(by_one_machine / "gradebook.db")
    assert sorted(seen) == sorted(set(seen))
    assert started[0].turns[0] == (2 if elements is Mortal else 1)
    assert not list((course / "grades" / info.directory).glob(f"{QUEUE}*"))


class Scripted:
    """Elements that judge nothing: ``act`` says, at each look, what becomes of the queue, and returns who is over."""

    def __init__(self, act: Callable[[WorkQueue, int], dict[int, End]], queue: WorkQueue) -> None:
        self.act, self.queue, self.looks, self.turns = act, queue, 0, 1

    def ended(self) -> dict[int, End]:
        self.looks += 1
        return self.act(self.queue, self.looks)

    def pace(self) -> float:
        return 0.0

    def again(self, element: int) -> None:
        self.turns += 1

    def last_words(self, element: int) -> str:
        return "no disk"

    def cancel(self) -> None: ...


def statuses(folder: Path, act: Callable[[WorkQueue, int], dict[int, End]], count: int = 3) -> tuple[dict[str, int], Scripted]:
    """The exit status of each submission, by one element that does as it is told."""
    queue = WorkQueue.of(folder / "queue", jobs(count))
    elements = Scripted(act, queue)
    return {job.student: code for job, code in collected(queue, elements, 1, jobs(count))}, elements


def test_a_submission_that_takes_its_element_down_again_and_again_is_given_up(tmp_path: Path) -> None:
    def act(queue: WorkQueue, look: int) -> dict[int, End]:
        while (ticket := queue.take(0)) is not None:
            if ticket.number == 1:
                return {0: End.LOST}
            queue.finish(ticket, 0)
        return {0: End.WELL}

    codes, elements = statuses(tmp_path, act)
    assert codes == {"s0": 0, "s1": 1, "s2": 0}
    assert elements.turns == 1 + MOST_STRIKES


def test_when_no_element_stays_alive_it_says_why(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    elements = Scripted(lambda queue, look: {0: End.LOST}, queue)
    with pytest.raises(UserError, match=r"no disk.*--resume judges the other 3"):
        list(collected(queue, elements, 1, jobs(3)))
    assert elements.turns == MOST_TURNS


def test_a_cancelled_array_says_how_to_go_on(tmp_path: Path) -> None:
    def act(queue: WorkQueue, look: int) -> dict[int, End]:
        queue.finish(queue.take(0), 0)
        return {0: End.CANCELLED}

    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    elements = Scripted(act, queue)
    with pytest.raises(UserError, match="--resume judges the other 2"):
        list(collected(queue, elements, 1, jobs(3)))
    assert elements.looks == 1


def test_one_cancelled_element_is_not_sent_again_and_leaves_its_work_to_the_others(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))

    def act(queue: WorkQueue, look: int) -> dict[int, End]:
        if look == 1:
            queue.take(1)
        if look == 2:
            while (ticket := queue.take(0)) is not None:
                queue.finish(ticket, 0)
        return {1: End.CANCELLED}

    elements = Scripted(act, queue)
    assert {job.student: code for job, code in collected(queue, elements, 2, jobs(3))} == {"s0": 0, "s1": 0, "s2": 0}
    assert elements.turns == 1
