"""A call of the student's code in a notebook ends after the seconds of its check, with the line."""

import re
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading import Lab
from dlo_lib.grading.checks.contract import scenario
from dlo_lib.grading.checks.exceptions import Late, Wrong
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.notebook.local_student import LocalStudent

LOOP = "def scale(x):\n    while True:\n        x = x + 1\n"
CATCHES = """
import time
def scale(x):
    for interrupted in range(3):
        try:
            if interrupted < 2:
                time.sleep(60)
        except:
            pass
    return x + interrupted
"""
BELOW = "import time\ndef wait(x):\n    time.sleep(60)\ndef scale(x):\n    return wait(x)\n"


def student(source: str, seconds: float) -> LocalStudent:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<cell scale>", "exec"), namespace)
    return LocalStudent(namespace, seconds)


@pytest.mark.parametrize(("source", "line"), [(LOOP, "line [23]"), (BELOW, "line 3")])
def test_an_endless_call_ends_with_its_line(source: str, line: str) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Wrong, match=f"^your code is still in {line} of your cell after 0.2 s: `"):
        student(source, 0.2).scale(1)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_after_a_time_out_the_other_checks_of_the_question_do_not_run(
    small: LabSource, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    loop = LOOP.replace("scale(x):", "absmax_scale(x):\n    calls.append(1)")
    namespace: dict[str, Any] = {"calls": calls}
    exec(compile(loop, "<cell scale>", "exec"), namespace)
    lab = Lab(namespace, small.given)
    fast = replace(lab._checks, visible=tuple(replace(check, seconds=0.2) for check in lab._checks.visible))
    monkeypatch.setattr(lab, "_checks", fast)
    assert lab.check("scale") == 0
    assert len(calls) == 1
    said = capsys.readouterr().out
    assert said.count("your code is still in line") == 1
    assert "0/1  not run: the same as above\n" in said


LOOPS_ON_ONE_RANK = """
import torch
import torch.distributed as dist
def program(rank):
    x = torch.ones(2)
    if rank == 1:
        while x.sum() > 0:
            x = x + 1
    dist.all_reduce(x)
    return x
"""


@scenario
def runs(student, rank, world):
    return student.program(rank)


def test_a_rank_that_loops_is_named_with_its_line_and_not_that_of_the_rank_that_waits_for_it() -> None:
    with pytest.raises(Late) as caught:
        student(LOOPS_ON_ONE_RANK, 5).ranks(runs, [{}] * 2)
    said, _, table = str(caught.value).partition("\n\n")
    assert re.fullmatch(r"rank 1 was still in line [78] of cell `scale` after 5 s", said)
    assert re.search(r"0 +waits in all_reduce of float32\[2\] .*\n.*line 9", table), table
    assert re.search(r"1 +computes", table)


SKIPS_ON_ONE_RANK = """
import torch
import torch.distributed as dist
def program(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    return rank
"""


@scenario
def runs_and_agrees(student, rank, world):
    done = student.program(rank)
    dist.all_reduce(torch.tensor([done]))
    return done


def test_a_call_that_one_rank_skips_is_named_before_the_call_of_the_check_that_it_meets() -> None:
    with pytest.raises(Wrong) as caught:
        student(SKIPS_ON_ONE_RANK, 30).ranks(runs_and_agrees, [{}] * 2)
    said, _, rest = str(caught.value).partition("\n\n")
    assert re.fullmatch(
        r"SKIPPED CALL: on rank 0 your code calls all_reduce of float32\[2\] \(.*cell scale.*, line 6.*\); "
        r"on rank 1 it ends without this call\.",
        said,
    )
    assert rest.startswith("MISMATCH in call 1 on world")


def test_code_that_catches_everything_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code waits in a call, because from Python 3.13 on a ``try`` does not cover the jump at the end of a
    ``while`` loop, where the interruption of a loop is raised."""
    monkeypatch.setattr("dlo_lib.grading.notebook.time_limit.AGAIN_S", 0.1)
    assert student(CATCHES, 0.1).scale(1) == 3


def test_a_call_that_ends_in_time_is_not_touched() -> None:
    assert student("def scale(x):\n    return x + 1\n", 5).scale(1) == 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_another_thread_has_no_limit() -> None:
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(student("def scale(x):\n    return x + 1\n", 0.01).scale(1))
    )
    thread.start()
    thread.join()
    assert answers == [2]
