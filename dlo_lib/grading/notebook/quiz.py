"""The quiz of a lab in its notebook: the questions, and for a person without a class the reasons.

In a class the feedback explains the answers, when the instructor decides. A person alone has no such
feedback, and reads the reasons here: after the third check with an answer to every question, or on
``lab.quiz.reveal()``. They change no points.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.quiz import is_right, quiz_html, quiz_text, reason
from dlo_lib.grading.checks.quiz_question import NAME, Question
from dlo_lib.grading.checks.verdict import MARKS, Shown, show
from dlo_lib.grading.lab.exchange import has_class
from dlo_lib.grading.lab.quiz_answers import read_quiz_answers
from dlo_lib.grading.notebook.progress import read_progress

TRIES = 3  # checks with all answers, after which a person alone reads the reasons


class Quiz:
    """``lab.quiz()`` shows the questions, ``lab.quiz.reveal()`` the reasons.

    Args:
        questions: the quiz.
        folder: the folder of the lab.
        lab: the directory of the lab, under which progress is stored.
        namespace: the notebook's ``globals()``.
        grading: whether nbgrader executes the notebook; the reasons are then never shown.
    """

    def __init__(
        self,
        questions: Mapping[str, Question],
        folder: Path,
        lab: str,
        namespace: MutableMapping[str, Any],
        grading: bool,
    ) -> None:
        self._questions = questions
        self._folder = folder
        self._lab = lab
        self._namespace = namespace
        self._grading = grading

    def __call__(self) -> None:
        """Show the questions. The answers are a dict in the cell below."""
        page, text = quiz_html(self._questions), quiz_text(self._questions)
        if self._alone():
            note = Shown(
                tr(
                    "After {tries} checks with an answer to every question, the check gives the reasons; "
                    "lab.quiz.reveal() gives them at once.",
                    tries=TRIES,
                )
            )
            bundle, _ = note._repr_mimebundle_()
            page, text = page + bundle["text/html"], f"{text}\n{note.text}"
        show(Shown(text, page))

    def reveal(self) -> None:
        """Show the right answer to each question, and the reason; in a class, say who gives them."""
        if self._grading:
            return
        if has_class():
            show(
                Shown(
                    tr(
                        "You submit this lab to a class. The feedback explains the answers, when your "
                        "instructor decides: nbgrader's Assignment List fetches it."
                    )
                )
            )
        elif not self._answers:
            show(Shown(tr("This copy of the lab has no answers of the quiz: `dlo lab` brings them.")))
        else:
            show(self._reasons())

    def after_check(self, complete: bool) -> None:
        """Count a check of the answers; from the third complete one on, show the reasons to a person alone.

        Args:
            complete: whether every question has an answer.
        """
        if not complete or not self._alone():
            return
        progress = read_progress(self._lab)
        progress.quiz_tries += 1
        progress.save()
        if progress.quiz_tries >= TRIES:
            show(self._reasons())

    @property
    def _answers(self) -> Mapping[str, Any]:
        return read_quiz_answers(self._folder)

    def _alone(self) -> bool:
        return not self._grading and bool(self._answers) and not has_class()

    def _reasons(self) -> Shown:
        given = self._namespace.get(NAME)
        lines = []
        for question, answer in self._answers.items():
            own = given.get(question) if type(given) is dict else None
            text = reason(question, answer)
            lines.append(
                f"{MARKS[True]} {text}"
                if is_right(own, answer)
                else tr("{mark} {text} (right: {option})", mark=MARKS[False], text=text, option=answer.option)
            )
        return Shown("\n".join(lines))
