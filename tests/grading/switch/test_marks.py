"""Marks in a scenario: the number of calls issued when the memory was read, also for marks sent by the
student.
"""

import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import scenario
from dlo_lib.grading.notebook.local_student import LocalStudent

HONEST = """
def work(x):
    dist.all_reduce(x)
    return x
"""
SENDS_IT_EARLY = """
import sys

def work(x):
    names = sys._getframe(1).f_globals
    names["mark"]("half")
    names["mark"] = lambda name: None
    dist.all_reduce(x)
    return x
"""


@scenario
def halves(student, rank, world):
    student.work(torch.ones(3))
    mark("half")  # noqa: F821 - of the ranks
    student.work(torch.ones(3))
    return rank


def calls_before_half(source: str) -> list[int]:
    names = {"torch": torch, "dist": dist}
    exec(compile(source, "<cell work>", "exec"), names)
    run = LocalStudent(names, 60).ranks(halves, [{}, {}])
    assert [len(run.calls(rank)) for rank in range(2)] == [2, 2]
    return [run.calls_before(rank, "half") for rank in range(2)]


def test_a_mark_comes_after_the_calls_before_it():
    assert calls_before_half(HONEST) == [1, 1]


def test_a_mark_sent_early_by_the_student_is_detected():
    assert calls_before_half(SENDS_IT_EARLY) == [0, 0]
