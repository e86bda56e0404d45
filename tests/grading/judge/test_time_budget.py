"""The seconds of a submission: full limits until it exceeds one, several times the reference's afterwards."""

from __future__ import annotations

import pytest

from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.judge.judge import Judge, reference_submission
from dlo_lib.grading.judge.time_budget import TOTAL_SECONDS, TimeBudget
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.sandbox.host import Zygote

LATE = Ended(Status.TIMEOUT, "no answer in time")


def check(seconds: float = 60.0, name: str = "check_it") -> Check:
    return Check(lambda student, t: None, "it", 1.0, seconds, name, "It")


def test_the_first_limit_is_the_checks_own_if_the_reference_is_unknown() -> None:
    assert TimeBudget().seconds(check(60)) == 60
    assert TimeBudget().load_seconds(20) == 20


def test_an_unknown_reference_leaves_a_fifth_of_the_limit() -> None:
    budget = TimeBudget()
    for _ in range(9):
        budget.note(LATE)
    assert budget.seconds(check(60)) == 12


@pytest.mark.parametrize(
    ("seconds", "reference", "limit"), [(60, 0.1, 5), (60, 1.0, 20), (60, 9.0, 60), (3, 9.0, 3)]
)
def test_the_first_limit_is_many_times_the_references_time(
    seconds: float, reference: float, limit: float
) -> None:
    assert TimeBudget({"check_it": reference}).seconds(check(seconds)) == limit


def test_each_exceeded_limit_shortens_the_next_ones_but_a_right_answer_keeps_its_time() -> None:
    budget = TimeBudget({"check_it": 0.01, "check_slow": 3.0})
    limits = []
    for _ in range(4):
        budget.note(LATE)
        limits.append(budget.seconds(check()))
    assert limits == [0.75, 0.5, 0.375, 0.3]
    assert budget.seconds(check(name="check_slow")) == 15
    for _ in range(9):
        budget.note(LATE)
    assert budget.seconds(check()) == 0.25


def test_an_answer_five_times_as_slow_as_the_reference_never_meets_a_limit() -> None:
    reference = {f"check_{number}": 0.3 * number for number in range(20)}
    budget = TimeBudget(reference)
    budget.note(LATE)  # in another question
    for name, seconds in reference.items():
        assert budget.seconds(check(name=name)) >= 5 * seconds
        budget.computed += 5 * seconds
    assert budget.exceeded == 1  # only the limit above


def test_cells_that_have_ended_keep_twice_their_time() -> None:
    budget = TimeBudget()
    limits = []
    for _ in range(4):
        budget.note(LATE)
        limits.append(budget.load_seconds(20))
    assert limits == [4, 2, 1, 1]
    budget.note_load(3.0)
    budget.note_load(0.1)  # with fewer cells
    assert budget.load_seconds(20) == 6
    assert budget.load_seconds(5) == 5


def test_other_ends_are_no_exceeded_limits() -> None:
    budget = TimeBudget()
    budget.note(Ended(Status.KERNEL_DIED, "the process ended by itself"))
    budget.note(ValueError("not plain"))
    assert budget.exceeded == 0
    budget.note(Ended(Status.OOM, "too much"))
    assert budget.exceeded == 1


def test_a_submission_that_computes_for_too_long_in_all_has_short_limits() -> None:
    budget = TimeBudget({"check_it": 0.01})
    budget.computed = TOTAL_SECONDS
    assert budget.seconds(check()) == 5
    budget.computed += 1
    assert budget.seconds(check()) == 0.375


SLEEPS = """import time
def absmax_scale(x):
    time.sleep(0.3)
    return x.float().abs().amax(dim=1) / 127
"""


def test_the_seconds_of_the_reference_include_those_in_which_it_sleeps(
    small: LabSource, zygote: Zygote
) -> None:
    """The limits count them too. A scenario of lab 10 sleeps for 0.5 s, longer than the shortest limit."""
    judge = Judge(small, load_checks(small.given, small.folder), "secret", zygote)
    judge.judge_alone("scale", reference_submission(small, {"scale": SLEEPS}))
    assert judge.seconds["check_largest"] > 0.2
