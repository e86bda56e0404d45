"""A quiz: questions and options in ``checks.py``, the right answers only in ``hidden.py``.

The student's answers are a dict in a solution cell. That it is complete is a visible check; that each answer is right is a hidden check
of its own. In ``checks.py`` and ``hidden.py``::

    QUIZ = {"q1": Question("What limits data parallelism?", {"a": "memory of one GPU", "b": "the number of ranks"})}
    complete = quiz_complete(QUIZ, points=1)

    from .checks import QUIZ
    right = quiz_right(QUIZ, {"q1": Answer("a", "every rank holds the whole model")}, points=1)       # points of each answer
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from dlo_lib.grading.contract import Check, Student, Trial, Wrong
from dlo_lib.text import tr

NAME = "quiz"  # of the question, its cell and the student's dict


@dataclass(frozen=True)
class Question:
    """A question and its options, by their letter."""

    text: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """The letter of the right option, and why, in one sentence that the feedback shows when it was missed."""

    option: str
    why: str


def quiz_complete(quiz: Mapping[str, Question], points: float, name: str = NAME) -> Check:
    """The visible check: every question has an answer that is one of its options."""

    def check_complete(student: Student, t: Trial) -> None:
        answers = _answers(student, t, name)
        missing = [question for question in quiz if _is_empty(answers.get(question))]
        t.that(not missing, "no answer yet to {missing}", missing=", ".join(missing))
        for question, asked in quiz.items():
            known = ", ".join(asked.options)
            t.that(_is_option(answers[question], asked), "{question}: answer with one of {known}", question=question, known=known)
        unknown = [str(key) for key in answers if key not in quiz]
        t.that(not unknown, "there is no question {unknown}", unknown=", ".join(unknown))

    return Check(check_complete, name, float(points), 10.0, f"{name}_complete", tr("Every question has an answer"))


def quiz_right(quiz: Mapping[str, Question], answers: Mapping[str, Answer], points: float, name: str = NAME) -> tuple[Check, ...]:
    """The hidden checks, one a question, each worth ``points``.

    Raises:
        ValueError: a question without right answer, or an answer that is none of its options.
    """
    for question in quiz.keys() | answers.keys():
        if question not in quiz or question not in answers or answers[question].option not in quiz[question].options:
            raise ValueError(f"the quiz and its right answers do not agree on {question}")

    def make(question: str) -> Check:
        def check_right(student: Student, t: Trial) -> None:
            given = _answers(student, t, name).get(question)
            right = answers[question]
            t.that(type(given) is str and given == right.option, f"{question}: {right.why}")

        return Check(
            check_right, name, float(points), 10.0, f"{name}_{question}", tr("The answer to {question} is right", question=question)
        )

    return tuple(make(question) for question in quiz)


def quiz_html(quiz: Mapping[str, Question]) -> str:
    """The questions, for a notebook."""
    rows = []
    for name, question in quiz.items():
        options = "".join(f"<li><b>{html.escape(letter)}</b> {html.escape(tr(text))}</li>" for letter, text in question.options.items())
        rows.append(f"<p><b>{html.escape(name)}</b> {html.escape(tr(question.text))}</p><ul style='list-style:none'>{options}</ul>")
    return "".join(rows)


def quiz_text(quiz: Mapping[str, Question]) -> str:
    """The questions as plain text."""
    lines = []
    for name, question in quiz.items():
        lines += [f"{name}  {tr(question.text)}", *(f"    {letter}  {tr(text)}" for letter, text in question.options.items())]
    return "\n".join(lines)


def _answers(student: Student, t: Trial, name: str) -> dict:
    answers = student.get(name)
    if type(answers) is not dict:
        raise Wrong(tr('`{name}` should be a dict such as {{"q1": "a"}}', name=name))
    return answers


def _is_empty(answer: object) -> bool:
    return answer is None or (type(answer) is str and not answer.strip())


def _is_option(answer: object, question: Question) -> bool:
    return type(answer) is str and answer in question.options
