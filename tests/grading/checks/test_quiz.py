"""Each answer of a quiz comes with its reason after grading, whether it is right or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.checks import contract
from dlo_lib.grading.checks.outcome import Status, run_check
from dlo_lib.grading.checks.quiz import Answer, Question, quiz_html, quiz_right
from dlo_lib.grading.judge.report import check_report
from dlo_lib.grading.lab.course import QUIZ_ANSWERS_FILE
from dlo_lib.grading.lab.declared import declared_answers
from dlo_lib.grading.lab.quiz_answers import quiz_answers_text, read_quiz_answers
from tests.grading.two_folders import write_lab

QUIZ = {"q1": Question("What limits data parallelism?", {"a": "memory", "b": "ranks"})}
ANSWERS = {"q1": Answer("a", " ".join(["every rank", "holds the whole model"]))}
LAB = """
number = 7
name = "sums"
title = "Sums"
core = true
minutes = 10
quiz.q1 = { text = "Which?", a = "this", b = "that" }
quiz.q2 = { text = "Why?", a = "this", b = "that" }
"""


class Answered:
    """A student whose quiz has these answers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def get(self, name: str) -> dict[str, Any]:
        return self.answers


@pytest.mark.parametrize(
    ("answer", "status"), [("a", Status.OK), (" A ", Status.OK), ("b", Status.WRONG), (1, Status.WRONG)]
)
def test_the_reason_is_published(answer, status):
    """Of a hidden check only the author's words are; the text stands in no code that runs here."""
    (check,) = quiz_right(QUIZ, ANSWERS, points=1)
    report = check_report(run_check(check, Answered(q1=answer), seed=0), hidden=True)
    assert report.status == status.value
    assert report.published == ": ".join(["q1", ANSWERS["q1"].why])


def test_a_text_that_another_hidden_check_has_formatted_stays_hidden():
    @contract.check("sums", points=1)
    def check_sum(student, t):
        secret = student.get("sums")["q1"]
        t.that(False, f"expected {secret}")

    report = check_report(run_check(check_sum, Answered(q1="from the student"), seed=0), hidden=True)
    assert report.status == Status.WRONG.value
    assert "student" not in report.published


def source(root: Path, answers: str) -> Path:
    return write_lab(root, "90_quiz", {"lab.toml": LAB, "hidden.py": f"ANSWERS = {{{answers}}}\n"})


def test_the_answers_are_read_without_running_the_hidden_checks(tmp_path):
    given = '"q1": Answer("a", "every rank " "holds it"), "q2": Answer(option="b", why="and more")'
    folder = source(tmp_path, given)
    assert declared_answers(folder) == {
        "q1": Answer("a", "every rank holds it"),
        "q2": Answer("b", "and more"),
    }
    file = tmp_path / QUIZ_ANSWERS_FILE
    file.write_text(text := quiz_answers_text(folder))
    assert "every rank" not in text  # no reader sees it by accident
    assert read_quiz_answers(tmp_path) == declared_answers(folder)
    file.write_text(text[:40])
    with pytest.raises(UserError, match="damaged: `dlo lab` restores it"):
        read_quiz_answers(tmp_path)


@pytest.mark.parametrize(
    "second", ["", '"q2": Answer("b", f"{1 + 1} ranks")', '"q2": "b"', '"q2": Answer("b")']
)
def test_an_answer_that_is_missing_or_no_literal_is_refused(tmp_path, second):
    with pytest.raises(UserError, match="must have 'q2': Answer.*no f-string"):
        declared_answers(source(tmp_path, f'"q1": Answer("a", "why"), {second}'))


def test_an_answer_to_no_question_is_refused():
    with pytest.raises(ValueError, match="do not agree on q2"):
        quiz_right(QUIZ, {**ANSWERS, "q2": Answer("a", "")}, points=1)


def test_code_in_a_quiz_is_set_as_code():
    page = quiz_html({"q1": Question("What is `a < b`?", {"a": "`True`"})})
    assert "What is <code>a &lt; b</code>?" in page
    assert "<code>True</code>" in page
