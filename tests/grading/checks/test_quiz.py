"""Each answer of a quiz comes with its reason after grading, whether it is right or wrong."""

from __future__ import annotations

from typing import Any

import pytest

from dlo_lib.grading.checks.outcome import Status, run_check
from dlo_lib.grading.checks.quiz import Answer, Question, quiz_html, quiz_right

QUIZ = {"q1": Question("What limits data parallelism?", {"a": "memory", "b": "ranks"})}
ANSWERS = {"q1": Answer("a", "every rank holds the whole model")}


class Answered:
    """A student whose quiz has these answers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def get(self, name: str) -> dict[str, Any]:
        return self.answers


@pytest.mark.parametrize(
    ("answer", "status"), [("a", Status.OK), (" A ", Status.OK), ("b", Status.WRONG), (1, Status.WRONG)]
)
def test_the_reason_is_shown(answer, status):
    (check,) = quiz_right(QUIZ, ANSWERS, points=1)
    outcome = run_check(check, Answered(q1=answer), seed=0)
    assert (outcome.status, outcome.words) == (status, "q1: every rank holds the whole model")


def test_an_answer_to_no_question_is_refused():
    with pytest.raises(ValueError, match="do not agree on q2"):
        quiz_right(QUIZ, {**ANSWERS, "q2": Answer("a", "")}, points=1)


def test_code_in_a_quiz_is_set_as_code():
    page = quiz_html({"q1": Question("What is `a < b`?", {"a": "`True`"})})
    assert "What is <code>a &lt; b</code>?" in page
    assert "<code>True</code>" in page
