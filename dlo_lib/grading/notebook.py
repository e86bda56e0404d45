"""The notebook's side of a lab: checks that answer at once, graded hints, the quiz, and the reference for a stuck student.

``lab = Lab(globals())`` finds ``lab.toml`` and ``checks.py`` beside the notebook. A test cell is one line, ``lab.check("question")``: it
shows a table and returns the points as a number, which nbgrader reads as partial credit. Inputs are random in each run; what failed can be
repeated with the seed that is shown.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dlo_lib.errors import UserError, unknown_name
from dlo_lib.grading.course import LAB_FILE, read_lab_info
from dlo_lib.grading.modules import load_checks, load_reference
from dlo_lib.grading.outcome import run_check, seed_for
from dlo_lib.grading.progress import Progress, read_progress
from dlo_lib.grading.quiz import quiz_html, quiz_text
from dlo_lib.grading.student import LocalStudent
from dlo_lib.grading.verdict import Shown, Verdict, show
from dlo_lib.text import tr

HIDDEN_VARIABLE = "DLO_HIDDEN"  # the folder of hidden.py; set only where stock nbgrader grades


class Score(float):
    """Points earned. Its plain text is the number alone: that is what nbgrader reads."""

    maximum: float

    def __new__(cls, earned: float, maximum: float) -> Score:
        """``earned`` of ``maximum`` points."""
        score = super().__new__(cls, earned)
        score.maximum = maximum
        return score

    def __repr__(self) -> str:
        return repr(float(self))

    def _repr_html_(self) -> str:
        return tr("{earned:g} of {maximum:g} points", earned=float(self), maximum=self.maximum)


class Lab:
    """A lab, from within its notebook.

    Args:
        namespace: the notebook's ``globals()``.
        folder: where ``lab.toml`` and ``checks.py`` lie; by default the folder the notebook runs in.

    Raises:
        UserError: they are not there.
    """

    def __init__(self, namespace: MutableMapping[str, Any], folder: str | Path | None = None) -> None:
        self._namespace = namespace
        self._folder = Path(folder or Path.cwd())
        if not (self._folder / LAB_FILE).is_file():
            raise UserError(f"no {LAB_FILE} in {self._folder}: open the notebook in its own folder, beside {LAB_FILE} and checks.py")
        hidden = os.environ.get(HIDDEN_VARIABLE)
        self._grading = hidden is not None
        self._checks = load_checks(self._folder, Path(hidden) if hidden else None)
        self._references: dict[str, Mapping[str, Any]] = {}
        self.info = read_lab_info(self._folder)

    def check(self, question: str, seed: int | None = None) -> Score:
        """Run the checks of ``question`` on the notebook as it is now and show the verdicts; return the points earned.

        Args:
            seed: of the inputs, as a failing run showed it; random without.
        """
        self._known(question)
        seed = secrets.randbelow(10**6) if seed is None else seed
        # Warnings of correct code go to stderr, and stock nbgrader gives 0 to a test cell with anything there.
        with contextlib.redirect_stderr(sys.stdout):
            outcomes = [
                run_check(check, LocalStudent(self._namespace, check.seconds), seed_for(str(seed), self.info.directory, check))
                for check in self._checks.of(question)
            ]
        hidden = {check.name for check in self._checks.hidden}
        verdict = Verdict(question, tuple(outcomes), frozenset(hidden), seed, self._uses_reference(question))
        show(verdict.shown())
        if not self._grading:
            progress = self._progress
            progress.earned[question], progress.possible[question] = verdict.earned, verdict.maximum
            progress.save()
        return Score(verdict.earned, verdict.maximum)

    def hint(self, question: str) -> None:
        """Show the next hint for ``question``: a nudge, then a pointer, then a sketch. Those already seen are shown again above it."""
        self._known(question)
        hints = self._checks.hints.get(question, ())
        if not hints:
            show(Shown(tr("There are no hints for {question}.", question=question)))
            return
        progress = self._progress
        seen = min(progress.hints.get(question, 0) + 1, len(hints))
        progress.hints[question] = seen
        progress.save()
        lines = [tr("Hint {number} of {all}: {hint}", number=n, all=len(hints), hint=tr(hints[n - 1])) for n in range(1, seen + 1)]
        if seen == len(hints):
            lines.append(tr('That was the last one. lab.use_reference("{question}") lets you go on without it.', question=question))
        show(Shown("\n".join(lines)))

    def quiz(self, name: str = "quiz") -> None:
        """Show the questions of the quiz. Answers go into the cell below, as a dict."""
        self._known(name)
        show(Shown(quiz_text(self._checks.quiz), quiz_html(self._checks.quiz)))

    def use_reference(self, question: str) -> None:
        """Give the names of ``question`` their reference, the library's own, so that the later steps can be done without it.

        While the notebook uses it, the question earns no points.
        """
        self._known(question)
        adapters = load_reference(self._folder).get(question)
        if not adapters:
            raise UserError(f"{question} has no reference: only a step that later ones stand on has one")
        self._namespace.update(adapters)
        self._references[question] = adapters
        names = ", ".join(f"`{name}`" for name in adapters)
        text = tr("{names} is now the reference. {question} earns no points while this is in use.", names=names, question=question)
        show(Shown(text))

    def _uses_reference(self, question: str) -> bool:
        """Whether a name of ``question`` is still the reference: running one's own cell again brings the points back."""
        return any(self._namespace.get(name) is function for name, function in self._references.get(question, {}).items())

    @property
    def _progress(self) -> Progress:
        return read_progress(self.info.directory)

    def _known(self, question: str) -> None:
        if question not in self._checks.questions:
            raise unknown_name("question", question, self._checks.questions)
