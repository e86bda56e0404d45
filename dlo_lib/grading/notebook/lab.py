"""``Lab``, the notebook's side of a lab: checks with immediate verdicts, hints, the quiz, and references.

``lab = Lab(globals())`` finds ``lab.toml`` and ``checks/`` beside the notebook. A test cell is one line,
``lab.check("question")``: it shows a table and returns the points as a number, which nbgrader reads as
partial credit. Inputs are random in each run; the seed that is shown repeats them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.files import state_dir
from dlo_lib.base.text import tr
from dlo_lib.base.worker_start import start_workers_by_fork
from dlo_lib.grading.checks.outcome import Outcome, Status, not_run, run_check, seed_for
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.checks.verdict import QuestionVerdict, Shown, show
from dlo_lib.grading.lab.course import LAB_FILE, read_lab_info
from dlo_lib.grading.lab.declared import read_in_grading
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.notebook.cell_runs import cell_runs
from dlo_lib.grading.notebook.check_output import CheckOutput
from dlo_lib.grading.notebook.defining_cell import where_defined
from dlo_lib.grading.notebook.failed_cells import failed_cells
from dlo_lib.grading.notebook.interrupts import CheckInterrupted
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.notebook.progress import Progress, read_progress
from dlo_lib.grading.notebook.quiz import Quiz
from dlo_lib.grading.notebook.reference import use_reference
from dlo_lib.grading.notebook.tracebacks import shorten_tracebacks
from dlo_lib.grading.notebook.undefined_names import undefined_in
from dlo_lib.grading.notebook.verdict_age import changed_before, older_verdicts, show_outdated
from dlo_lib.grading.notebook.verdict_display import VerdictDisplay

HIDDEN_VARIABLE = "DLO_HIDDEN"  # the folder of hidden.py; set only when nbgrader executes the notebook


class Score(float):
    """The points earned. Its plain text is the number, which nbgrader reads; a notebook shows ``text``."""

    text: str

    def __new__(cls, earned: float, text: str) -> Score:
        """``earned`` points, which a notebook shows as ``text``."""
        score = super().__new__(cls, earned)
        score.text = text
        return score

    def __repr__(self) -> str:
        return repr(float(self))

    def _repr_html_(self) -> str:
        return self.text


class Lab:
    """A lab, used in its notebook.

    Args:
        namespace: the notebook's ``globals()``.
        folder: the folder of ``lab.toml`` and ``checks/``; by default the working directory.

    Raises:
        UserError: one of these files is missing.
    """

    def __init__(self, namespace: MutableMapping[str, Any], folder: str | Path | None = None) -> None:
        self._namespace = namespace
        self._folder = Path(folder or Path.cwd())
        if not (self._folder / LAB_FILE).is_file():
            cure = f"open the notebook in its folder, beside {LAB_FILE} and checks/"
            raise UserError(f"no {LAB_FILE} in {self._folder}: {cure}")
        hidden = os.environ.get(HIDDEN_VARIABLE)
        self._grading = hidden is not None
        self._checks = load_checks(self._folder, Path(hidden) if hidden else None)
        self._references: dict[str, Mapping[str, Any]] = {}
        self.info = read_lab_info(self._folder)
        self._notebook = self._folder / f"{self.info.name}.ipynb"
        shorten_tracebacks(namespace, self._notebook)
        start_workers_by_fork()
        self._failed = failed_cells()
        self._runs = cell_runs()
        self._later = {} if self._grading else read_in_grading(self._folder)
        if not self._grading and (older := older_verdicts(self._notebook, self._progress.judged)):
            show(Shown(older))

    def check(
        self, question: str, seed: int | None = None, *, instead: Mapping[str, Any] | None = None
    ) -> Score:
        """Run the checks of ``question`` on the notebook's current state and show the verdicts; return the
        points.

        Args:
            seed: the seed of the inputs, as shown by an earlier run; random by default.
            instead: names of the notebook with other values for this run, such as the standard library's form
                of what the student wrote. The result is not recorded as progress.
        """
        self._require_question(question)
        seed = secrets.randbelow(10**6) if seed is None else seed
        namespace = {**self._namespace, **instead} if instead else self._namespace
        used: dict[str, None] = {}
        display = VerdictDisplay()
        output = CheckOutput(state_dir() / "output" / f"{self.info.directory}-{question}.txt")
        cell, at = self._runs.last(question), datetime.now().astimezone()
        # Correct code may print warnings to stderr, for which nbgrader's execution would give a test cell 0
        # points.
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            outcomes = self._run_checks(question, namespace, used, seed, display, instead or ())
        hidden = {check.name for check in self._checks.hidden}
        verdict = QuestionVerdict(
            question,
            tuple(outcomes),
            frozenset(hidden),
            seed,
            not instead and self._uses_reference(question),
            () if instead else self._later.get(question, ()),
            sketch=not instead and self._opened_sketch(question),
            missing_cell=self._failed.explain(used) or self._skipped(namespace, used, outcomes),
            earlier_step="" if instead or self._grading else self._earlier_step(question),
            checked="" if self._grading else tr("Checked {at:%Y-%m-%d %H:%M:%S %Z}.", at=at),
            changed="" if instead else changed_before(self._notebook, question, cell),
        )
        display.show(verdict.shown())
        sys.stdout.write(output.shown())
        if not self._grading and not instead:
            progress = self._progress
            progress.earned[question], progress.possible[question] = verdict.earned, verdict.maximum
            if cell is not None:
                progress.judged[question] = (cell.digest, time.time())
                self._runs.on_run(question, partial(show_outdated, verdict, display, cell))
            progress.save()
            if question == QUIZ and self._checks.quiz:
                self.quiz.after_check(all(outcome.passed for outcome in outcomes))
        return Score(verdict.earned, verdict.points)

    def _run_checks(
        self,
        question: str,
        namespace: Mapping[str, Any],
        used: dict[str, None],
        seed: int,
        display: VerdictDisplay,
        instead: Collection[str] = (),
    ) -> list[Outcome]:
        """Return the outcomes of the checks of ``question``. After one whose code did not end in time the
        others do not run: they would take the same time again."""
        checks, outcomes = self._checks.of(question), list[Outcome]()

        def says(seconds: float) -> str:
            number = min(len(outcomes) + 1, len(checks))
            return tr(
                "{question}: check {number} of {all} is running, “{title}”, {seconds:.0f} s. ■ stops it.",
                question=question, number=number, all=len(checks), title=tr(checks[number - 1].title),
                seconds=seconds,
            )  # fmt: skip

        try:
            with display.alive(says):
                for check in checks:
                    late = next((each for each in outcomes if each.status is Status.TIMEOUT), None)
                    student = LocalStudent(namespace, check.seconds, used, instead)
                    drawn = seed_for(str(seed), self.info.directory, check)
                    outcomes.append(not_run(check, late) if late else run_check(check, student, drawn))
        except KeyboardInterrupt as error:
            display.stop(Shown(tr("{question}: interrupted.", question=question)))
            title = tr(checks[min(len(outcomes), len(checks) - 1)].title)
            raise CheckInterrupted(
                tr("The check “{title}” was interrupted; nothing is recorded.", title=title)
            ) from error
        return outcomes

    def hint(self, question: str) -> None:
        """Show the next hint for ``question``, a nudge, a pointer or a sketch, below the earlier ones.

        The number of hints shown is noted; later verdicts say if the sketch was opened. Hints cost no points.
        """
        self._require_question(question)
        hints = self._checks.hints.get(question, ())
        if not hints:
            show(Shown(tr("There are no hints for {question}.", question=question)))
            return
        progress = self._progress
        seen = min(progress.hints.get(question, 0) + 1, len(hints))
        progress.hints[question] = seen
        progress.save()
        lines = [
            tr("Hint {number} of {all}: {hint}", number=n, all=len(hints), hint=tr(hints[n - 1]))
            for n in range(1, seen + 1)
        ]
        if seen == len(hints):
            lines.append(
                tr(
                    "That was the last one. It is noted that the sketch was opened; it costs no points. "
                    'lab.use_reference("{question}") lets you continue without this step.',
                    question=question,
                )
            )
        show(Shown("\n".join(lines)))

    @property
    def quiz(self) -> Quiz:
        """``lab.quiz()`` shows the questions; ``lab.quiz.reveal()`` the reasons, without a class.

        Raises:
            UserError: the lab has no quiz.
        """
        self._require_question(QUIZ)
        return Quiz(self._checks.quiz, self._folder, self.info.directory, self._namespace, self._grading)

    def use_reference(self, question: str) -> None:
        """Define the names of ``question`` by the course's answer, so that later steps work.

        The question earns no points while the notebook uses the reference.
        """
        self._require_question(question)
        defined = use_reference(self._folder, question, self._namespace)
        self._namespace.update(defined)
        self._references[question] = defined
        names = ", ".join(f"`{name}`" for name in defined)
        text = tr(
            "{names}: the reference is in use. {question} earns no points meanwhile.",
            names=names,
            question=question,
        )
        show(Shown(text))

    def _uses_reference(self, question: str) -> bool:
        """Return True if a name of ``question`` is still the reference, and not the student's again."""
        return any(
            self._namespace.get(name) is function
            for name, function in self._references.get(question, {}).items()
        )

    def _opened_sketch(self, question: str) -> bool:
        """Return True if all hints of ``question`` were shown in the notebook; never True while grading."""
        hints = self._checks.hints.get(question, ())
        return not self._grading and 0 < len(hints) <= self._progress.hints.get(question, 0)

    def _skipped(self, namespace: Mapping[str, Any], used: Iterable[str], outcomes: Iterable[Outcome]) -> str:
        """Return a sentence on a name that the checks or the answer use and whose cell has not run; "" if
        there is none."""
        names = [*used, *undefined_in(outcome.message for outcome in outcomes)]
        found = (where_defined(self._notebook, name) for name in names if name not in namespace)
        return next(filter(None, found), "")

    def _earlier_step(self, question: str) -> str:
        """Return a sentence on the first step that ``question`` uses and whose checks did not all pass when
        they ran last; "" if there is none."""
        progress = self._progress
        for step in self.info.needed_by(question):
            earned, possible = progress.earned.get(step, 0.0), progress.possible.get(step)
            if self._uses_reference(step) or (possible is not None and earned >= possible):
                continue
            if possible is None:
                return tr(
                    'This step uses the step "{step}", whose check was not run yet: run lab.check("{step}").',
                    step=step,
                )
            return tr(
                'This step uses the step "{step}", whose last check gave {earned:g} of {possible:g} points: '
                "correct it first, and run its check again, or continue with "
                'lab.use_reference("{step}").',
                step=step, earned=earned, possible=possible,
            )  # fmt: skip
        return ""

    @property
    def _progress(self) -> Progress:
        return read_progress(self.info.directory)

    def _require_question(self, question: str) -> None:
        if question not in self._checks.questions:
            raise unknown_name("question", question, self._checks.questions)
