"""A right answer has the same points in a notebook and under the judge: all.

Here some that need no ranks. ``make proofs`` (``--every-check``) runs every declared right answer. What they
earn from the judge is tested in ``tests/grading/answers``.
"""

from __future__ import annotations

import pytest

from dlo_lib.grading.lab.source import read_lab
from tests.grading.answers import ROOT, Answer, Kind, declared, labs_with_answers
from tests.grading.in_notebook import outcomes_in_notebook

QUICK = [
    "01_first_device-odd-times_by_marks-timed",
    "04_compile-odd-decorated_by_torch-clip",
    "04_compile-odd-step_decorated_by_torch-optimizer",
]
EVERY = [answer for lab in labs_with_answers() for answer in declared(lab, Kind.ODD) if not answer.by]
SOME = [answer for answer in EVERY if answer.name in QUICK]
OTHERS = [answer for answer in EVERY if answer not in SOME]


def lost(answer: Answer) -> dict[str, str]:
    """Return the checks that the answer does not pass in a notebook, with their messages; none if it has the
    points that it must earn.
    """
    lab = read_lab(ROOT / "solutions" / answer.lab)
    outcomes = outcomes_in_notebook(lab, answer.question, answer.source(lab))
    points = sum(outcome.points for outcome in outcomes)
    failed = {outcome.check.name: outcome.message for outcome in outcomes if not outcome.passed}
    assert outcomes
    if answer.as_expected(points, lab):
        return {}
    return failed or {"points": f"{points:g}, not {answer.most(lab):g}"}


def test_the_quick_ones_exist() -> None:
    assert {answer.name for answer in SOME} == set(QUICK)


@pytest.mark.parametrize("answer", SOME, ids=lambda answer: answer.name)
def test_a_right_answer_has_all_points_in_a_notebook(answer: Answer) -> None:
    assert not lost(answer)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other" in metafunc.fixturenames:
        reason = f"NOT TESTED HERE: {len(OTHERS)} more right answers in a notebook (make proofs does)"
        some = OTHERS if metafunc.config.getoption("--every-check") else []
        none = [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")]
        metafunc.parametrize("other", some or none, ids=lambda answer: answer.name)


def test_every_right_answer_has_all_points_in_a_notebook(other: Answer) -> None:
    assert not lost(other)
