"""A right answer has the same points in a notebook and under the judge: all.

Here some that need no ranks. ``make proofs`` (``--every-check``) runs every right answer of the corpora. The
judge's side is in ``test_tricks`` and in ``python -m tests.grading.answers``.
"""

from __future__ import annotations

import pytest

from dlo_lib.grading.lab.source import read_lab
from tests.grading.answers import ODD, ROOT, Answer, answers, submissions
from tests.grading.in_notebook import outcomes_in_notebook

SINGLES = answers(ODD)
QUICK = [
    "01_first_device-odd-times_by_marks",
    "04_compile-odd-decorated_by_torch",
    "04_compile-odd-step_decorated_by_torch",
]
SOME = [answer for answer in SINGLES if answer.name in QUICK]
OTHERS = [answer for answer in (*SINGLES, *submissions(ODD)) if answer not in SOME]


def lost(answer: Answer) -> dict[str, str]:
    """Return the checks that the answer does not pass in a notebook, with their messages; none if it has the
    points that it must earn.
    """
    lab = read_lab(ROOT / "solutions" / answer.lab)
    outcomes = outcomes_in_notebook(lab, answer.question, answer.text)
    points = sum(outcome.points for outcome in outcomes)
    failed = {outcome.check.name: outcome.message for outcome in outcomes if not outcome.passed}
    assert outcomes
    if points == answer.must_earn(lab):
        return {}
    return failed or {"points": f"{points:g}, not {answer.must_earn(lab):g}"}


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
        metafunc.parametrize("other", some or none, ids=lambda answer: f"{answer.name}-{answer.question}")


def test_every_right_answer_has_all_points_in_a_notebook(other: Answer) -> None:
    assert not lost(other)
