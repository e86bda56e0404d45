"""``student.run``: a scenario without ranks gives the same in a notebook and under the judge, where it uses
the process that answers calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.contract import NotWritten, Student, Wrong, scenario
from dlo_lib.grading.checks.outcome import Ended
from dlo_lib.grading.judge.attempt import Attempt, RemoteStudent
from dlo_lib.grading.judge.cells import Origin, SubmissionCell
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.sandbox.host import Zygote

CELL = """import os
calls = []
def largest(fits):
    calls.append(os.getpid())
    size = 1
    while fits(2 * size): size *= 2
    return size
def fails(fits): return 1 / 0
def keeps(fits): return fits
def ends(fits): raise SystemExit
def count(): return [len(calls), len(set(calls))]
"""


@scenario
def searched(student, limits):
    return [student.largest(lambda size, limit=limit: size <= limit) for limit in limits]


@scenario
def failed(student):
    return student.fails(len)


@scenario
def kept(student):
    return student.keeps(len)


@scenario
def left(student):
    return student.ends(len)


@scenario
def missing(student):
    return student.not_defined(len)


@pytest.fixture(params=["notebook", "judge"])
def student(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Student]:
    if request.param == "notebook":
        names: dict[str, Any] = {}
        exec(compile(CELL, "<cell question>", "exec"), names)
        yield LocalStudent(names)
        return
    attempt = Attempt(zygote, [SubmissionCell("question", Origin.ANSWER, CELL)], seconds=30)
    yield RemoteStudent(attempt, "question", seconds=30)
    attempt.close()


def said(student: Student, run: Callable[[], object]) -> str:
    with pytest.raises((Wrong, NotPlain)) as error:
        run()
    return str(error.value)


def test_a_function_can_be_an_argument_and_all_runs_are_in_one_process(student: Student) -> None:
    assert student.run(searched, limits=[1, 100]) == [1, 64]
    assert student.run(searched, limits=[7]) == [4]
    assert student.count() == [3, 1]
    assert "division by zero" in said(student, lambda: student.run(failed))
    assert "builtin_function_or_method" in said(student, lambda: student.run(kept))
    assert "SystemExit" in said(student, lambda: student.run(left))
    with pytest.raises(NotWritten):
        student.run(missing)
    assert student.count() == [3, 1], "a scenario that fails ends no process"


def test_a_scenario_has_the_time_of_the_check(zygote: Zygote) -> None:
    """The next check gets a new process."""
    endless = "def largest(fits):\n    while True: pass\ndef count(): return 1"
    attempt = Attempt(zygote, [SubmissionCell("question", Origin.ANSWER, endless)], seconds=30)
    with pytest.raises(Ended):
        RemoteStudent(attempt, "question", seconds=0.2).run(searched, limits=[1])
    assert attempt.budget.exceeded == 1
    assert RemoteStudent(attempt, "question", seconds=30).count() == 1
    attempt.close()
