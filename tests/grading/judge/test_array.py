"""Judge a class by an array: each submission once, even if elements are lost, with the rows of one
machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.judge import array
from dlo_lib.grading.judge.array import (
    MAX_LOSSES,
    MAX_REFUSALS,
    MAX_STARTS,
    QUEUE,
    ArrayOfJudges,
    ElementEnd,
    JudgesStopped,
    collect_results,
)
from dlo_lib.grading.judge.array_element import work
from dlo_lib.grading.judge.client import RECORD_FILE, JudgeJob, Waiting
from dlo_lib.grading.judge.work_queue import WorkQueue
from dlo_lib.grading.lab.course import find_lab, source_labs
from tests.grading.small_class import LAB, results, rows


def jobs(count: int) -> list[JudgeJob]:
    folder = Path("/nowhere")
    return [JudgeJob(f"s{n}", folder / f"{n}.ipynb", folder / f"{n}.json", "key") for n in range(count)]


def test_each_submission_is_taken_once_by_concurrent_elements(tmp_path: Path) -> None:
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


def test_a_restarted_element_begins_with_the_submissions_it_had_taken(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    first = queue.take(4)
    assert first is not None
    assert first.job == jobs(3)[0]
    assert queue.take(5).number == 1
    assert WorkQueue(tmp_path / "queue").take(4) == first
    assert queue.taken_by(4) == [0]


def test_a_released_submission_can_be_taken_by_any_element(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(1))
    late = queue.take(0)
    assert not queue.has_work_for(1)
    queue.release(0)
    assert queue.has_work_for(1)
    assert queue.take(1).number == 0
    queue.finish(late, 0)  # the element still runs, but its submission belongs to another one now
    assert list(queue.finished()) == []


def test_no_element_finds_work_when_the_queue_is_removed(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(2))
    ticket = queue.take(0)
    queue.remove()
    queue.finish(ticket, 0)
    assert queue.take(0) is None
    assert not (tmp_path / "queue").exists()


def test_the_submissions_that_elements_judge_are_shown_with_their_seconds(tmp_path: Path) -> None:
    queue, shown = WorkQueue.of(tmp_path / "queue", jobs(3)), []

    class Slow(unittest.mock.Mock):
        """Element 0 takes a submission in each round; after the third it has judged all."""

        def ended(self) -> dict[int, ElementEnd]:
            ticket = queue.take(len(shown))
            if len(shown) == 2:
                for element in range(3):
                    while (own := queue.take(element)) is not None:
                        queue.finish(own, 0)
            assert ticket is not None
            return {}

        def pace(self) -> float:
            return 0.01

    judged = collect_results(queue, Slow(), 3, jobs(3), lambda running: shown.append(dict(running)))
    assert sorted(job.student for job, _ in judged) == ["s0", "s1", "s2"]
    assert [list(running) for running in shown] == [["s0"], ["s0", "s1"]]
    assert shown[0]["s0"] == 0 < shown[1]["s0"] < 60


class Processes:
    """Elements as processes of this machine."""

    def __init__(self, command: Sequence[str], elements: int) -> None:
        self.command, self.turns = command, [0] * elements
        self.running = [self._start(number) for number in range(elements)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        self.turns[number] += 1
        return subprocess.Popen([*self.command, "--element", str(number)])

    def ended(self) -> dict[int, ElementEnd]:
        return {
            number: ElementEnd.LOST if process.returncode else ElementEnd.FINISHED
            for number, process in enumerate(self.running)
            if process.poll() is not None
        }

    def pace(self) -> float:
        return 0.05

    def last_line(self, element: int) -> str:
        return ""

    def requeue(self, element: int) -> None:
        self.running[element] = self._start(element)

    def cancel(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def cancel_waiting(self) -> None:
        for process in self.running:
            process.wait()


class Mortal(Processes):
    """Kill the first element once, as soon as it has taken a submission."""

    def ended(self) -> dict[int, ElementEnd]:
        queue = WorkQueue(Path(self.command[-1]))
        if self.turns[0] == 1 and queue.taken_by(0):
            self.running[0].kill()
            self.running[0].wait()
        return super().ended()


@pytest.fixture
def proved(ungraded: Path, graded_class: Path) -> Path:
    """An ungraded class whose lab is on record as proved."""
    record = Path("grades") / LAB / RECORD_FILE
    (ungraded / record).parent.mkdir(parents=True)
    shutil.copyfile(graded_class / record, ungraded / record)
    return ungraded


@pytest.fixture
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """No judging service may be started in this process."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a judging service was started")

    monkeypatch.setattr(array, "JudgeClient", refuse)


@pytest.mark.slow
def test_an_array_gives_the_rows_of_one_machine_although_an_element_is_killed(
    graded_class: Path, proved: Path, no_service: None
) -> None:
    info, started = find_lab("91", source_labs()), []

    def start(command: Sequence[str], count: int) -> Processes:
        started.append(Mortal(command, count))
        return started[-1]

    judges = ArrayOfJudges(info, proved, start, 2, unsafe=True)
    seen = []
    grade_lab(info, proved, lambda row: seen.append(row.student), Options(unsafe=True), judges)
    assert results(proved) == results(graded_class)
    assert rows(proved / "gradebook.db") == rows(graded_class / "gradebook.db")
    assert sorted(seen) == sorted(set(seen))
    assert started[0].turns == [2, 1]
    assert not list((proved / "grades" / info.directory).glob(f"{QUEUE}*"))


def test_a_lab_that_is_not_on_record_is_proved_before_the_array_is_submitted(
    ungraded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unproved(contextlib.AbstractContextManager):
        def __init__(self, *_: object) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def prove(self, waiting: Waiting | None = None) -> None:
            raise UserError("the reference solution does not score full marks")

    monkeypatch.setattr(array, "JudgeClient", Unproved)
    start = unittest.mock.Mock()
    judges = ArrayOfJudges(find_lab("91", source_labs()), ungraded, start, 2, unsafe=True)
    with pytest.raises(UserError, match="does not score full marks"):
        list(judges.judge(jobs(3), 1))
    start.assert_not_called()


class Scripted:
    """Elements without judges: at each query, ``act`` changes the queue and returns the ended elements."""

    def __init__(self, act: Callable[[WorkQueue, int], dict[int, ElementEnd]], queue: WorkQueue) -> None:
        self.act, self.queue, self.looks, self.turns = act, queue, 0, 1

    def ended(self) -> dict[int, ElementEnd]:
        self.looks += 1
        return self.act(self.queue, self.looks)

    def pace(self) -> float:
        return 0.0

    def requeue(self, element: int) -> None:
        self.turns += 1

    def last_line(self, element: int) -> str:
        return "no disk"

    def cancel(self) -> None: ...

    def cancel_waiting(self) -> None: ...


def statuses(
    folder: Path,
    act: Callable[[WorkQueue, int], dict[int, ElementEnd]],
    count: int = 3,
) -> tuple[dict[str, int], Scripted]:
    """Return the exit status of each submission, by one element that follows ``act``."""
    queue = WorkQueue.of(folder / "queue", jobs(count))
    elements = Scripted(act, queue)
    return {job.student: code for job, code in collect_results(queue, elements, 1, jobs(count))}, elements


def test_elements_that_come_to_their_end_are_not_sent_again(tmp_path: Path) -> None:
    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        ticket = queue.take(0)
        if ticket is not None:
            queue.finish(ticket, 0)
        return {} if queue.has_work_for(0) else {0: ElementEnd.FINISHED}

    codes, elements = statuses(tmp_path, act)
    assert codes == {"s0": 0, "s1": 0, "s2": 0}
    assert elements.turns == 1


def test_a_submission_that_repeatedly_ends_its_element_is_marked_failed(tmp_path: Path) -> None:
    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        while (ticket := queue.take(0)) is not None:
            if ticket.number == 1:
                return {0: ElementEnd.LOST}
            queue.finish(ticket, 0)
        return {0: ElementEnd.FINISHED}

    codes, elements = statuses(tmp_path, act)
    assert codes == {"s0": 0, "s1": 1, "s2": 0}
    assert elements.turns == 1 + MAX_LOSSES


def test_the_error_when_no_element_stays_alive_has_the_reason(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    elements = Scripted(lambda queue, look: {0: ElementEnd.LOST}, queue)
    with pytest.raises(UserError, match=r"no disk.*--resume judges the other 3"):
        list(collect_results(queue, elements, 1, jobs(3)))
    assert elements.turns == MAX_STARTS


def test_the_error_of_a_cancelled_array_names_resume(tmp_path: Path) -> None:
    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        queue.finish(queue.take(0), 0)
        return {0: ElementEnd.CANCELLED}

    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    elements = Scripted(act, queue)
    with pytest.raises(UserError, match="--resume judges the other 2"):
        list(collect_results(queue, elements, 1, jobs(3)))
    assert elements.looks == 1


def test_a_cancelled_element_is_not_requeued_and_the_others_take_its_work(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))

    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        if look == 1:
            queue.take(1)
        if look == 2:
            while (ticket := queue.take(0)) is not None:
                queue.finish(ticket, 0)
        return {1: ElementEnd.CANCELLED}

    elements = Scripted(act, queue)
    codes = {job.student: code for job, code in collect_results(queue, elements, 2, jobs(3))}
    assert codes == {"s0": 0, "s1": 0, "s2": 0}
    assert elements.turns == 1


class Refused(Scripted):
    """Elements that the cluster does not start again, the first ``refusals`` times."""

    refusals = MAX_REFUSALS * 10

    def requeue(self, element: int) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise UserError("SLURM does not requeue the job: JobRequeue=0")
        self.turns += 1


def lost_with_one(queue: WorkQueue) -> None:
    """Element 1 takes a submission and is killed."""
    assert queue.take(1) is not None


def test_the_others_judge_what_an_element_had_that_is_not_started_again(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))
    lost_with_one(queue)

    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        ticket = queue.take(0) if look > MAX_REFUSALS else None
        if ticket is not None:
            queue.finish(ticket, 0)
        return {1: ElementEnd.LOST}

    codes = {job.student: code for job, code in collect_results(queue, Refused(act, queue), 2, jobs(3))}
    assert codes == {"s0": 0, "s1": 0, "s2": 0}, "one refusal is no loss: no submission is marked failed"


def test_a_refusal_to_start_an_element_is_not_the_last_word(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))

    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        if elements.turns == 1:
            return {0: ElementEnd.LOST}
        while (ticket := queue.take(0)) is not None:
            queue.finish(ticket, 0)
        return {0: ElementEnd.FINISHED}

    elements = Refused(act, queue)
    elements.refusals = MAX_REFUSALS - 1
    assert len(list(collect_results(queue, elements, 1, jobs(3)))) == 3
    assert elements.turns == 2


def test_what_is_judged_has_its_row_when_no_element_can_be_started_again(tmp_path: Path) -> None:
    queue = WorkQueue.of(tmp_path / "queue", jobs(3))

    def act(queue: WorkQueue, look: int) -> dict[int, ElementEnd]:
        if look == 1:
            queue.finish(queue.take(0), 0)
        return {0: ElementEnd.LOST}

    judged = collect_results(queue, Refused(act, queue), 1, jobs(3))
    assert next(judged)[0].student == "s0"
    with pytest.raises(JudgesStopped, match=r"JobRequeue=0.*--resume judges the other 2"):
        next(judged)


def test_judges_that_stop_leave_a_table(ungraded: Path) -> None:
    class Stopping:
        def screen(self, jobs: Sequence[JudgeJob], at_once: int) -> list[tuple[JudgeJob, int]]:
            return [(job, 1) for job in jobs]

        def judge(self, *_: object) -> list[tuple[JudgeJob, int]]:
            raise JudgesStopped("no element of the array stays alive")

    table = grade_lab(
        find_lab("91", source_labs()), ungraded, options=Options(unsafe=True), judges=Stopping()
    )
    assert table.stopped == "no element of the array stays alive"
    assert "ada" in table.csv()
    assert (ungraded / "grades" / "91_small" / "results.csv").exists()
