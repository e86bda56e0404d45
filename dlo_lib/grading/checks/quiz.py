"""The checks of a quiz, and its text in a notebook."""

from __future__ import annotations

from collections.abc import Mapping

from dlo_lib.base.markup import render
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.contract import Check, Student, Trial, Wrong
from dlo_lib.grading.checks.quiz_question import NAME, Answer, Question


def quiz_complete(quiz: Mapping[str, Question], points: float, name: str = NAME) -> Check:
    """Return the visible check that every question has one of its options as answer."""

    def check_complete(student: Student, t: Trial) -> None:
        answers = _answers(student, t, name)
        missing = [question for question in quiz if _is_empty(answers.get(question))]
        t.that(not missing, "no answer yet to {missing}", missing=", ".join(missing))
        for question, asked in quiz.items():
            known = ", ".join(asked.options)
            t.that(
                _is_option(answers[question], asked),
                "{question}: answer with one of {known}",
                question=question,
                known=known,
            )
        unknown = [str(key) for key in answers if key not in quiz]
        t.that(not unknown, "there is no question {unknown}", unknown=", ".join(unknown))

    return Check(
        check_complete, name, float(points), 10.0, f"{name}_complete", tr("Every question has an answer")
    )


def quiz_right(
    quiz: Mapping[str, Question], answers: Mapping[str, Answer], points: float, name: str = NAME
) -> tuple[Check, ...]:
    """Return the hidden checks, one per question, each worth ``points``.

    Raises:
        ValueError: a question has no right answer, or an answer is none of its options.
    """
    for question in quiz.keys() | answers.keys():
        if (
            question not in quiz
            or question not in answers
            or answers[question].option not in quiz[question].options
        ):
            raise ValueError(f"the quiz and its right answers do not agree on {question}")

    def make(question: str) -> Check:
        def check_right(student: Student, t: Trial) -> None:
            given = _answers(student, t, name).get(question)
            text = reason(question, answers[question])
            t.explain(text)
            t.compared += 1
            if not is_right(given, answers[question]):
                # Only the author's words, fixed before any answer was read, so a hidden check may publish
                # them. `t.that` would not: it cannot know what a text was formatted from.
                raise Wrong(text, text)

        return Check(
            check_right,
            name,
            float(points),
            10.0,
            f"{name}_{question}",
            tr("The answer to {question} is right", question=question),
        )

    return tuple(make(question) for question in quiz)


def is_right(given: object, answer: Answer) -> bool:
    """Return whether the student's answer ``given``, of any type, is the letter of ``answer``."""
    return _letter(given) == answer.option


def reason(question: str, answer: Answer) -> str:
    """Return the explanation of a question: the words of its author, the same for every student."""
    return tr("{question}: {why}", question=question, why=tr(answer.why))


def quiz_html(quiz: Mapping[str, Question]) -> str:
    """Return the questions as HTML for a notebook."""
    return render("quiz", quiz=quiz)


def quiz_text(quiz: Mapping[str, Question]) -> str:
    """Return the questions as plain text."""
    lines = []
    for name, question in quiz.items():
        lines += [
            f"{name}  {tr(question.text)}",
            *(f"    {letter}  {tr(text)}" for letter, text in question.options.items()),
        ]
    return "\n".join(lines)


def _answers(student: Student, t: Trial, name: str) -> dict:
    answers = student.get(name)
    if type(answers) is not dict:
        text = tr('`{name}` should be a dict such as {{"q1": "a"}}', name=name)
        raise Wrong(text, text)
    return answers


def _is_empty(answer: object) -> bool:
    return answer is None or (type(answer) is str and not answer.strip())


def _letter(answer: object) -> str | None:
    """Return the letter of an answer such as ``"B "``, or None if it is no text."""
    return answer.strip().lower() if type(answer) is str else None


def _is_option(answer: object, question: Question) -> bool:
    return _letter(answer) in question.options
