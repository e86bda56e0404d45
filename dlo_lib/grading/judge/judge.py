"""The judge turns a notebook into a report. Checks run in this process, the student's code in other
processes.

First, all cells run in order. Then each question that lost points is judged alone, with the given cells, the
reference solutions of the steps it needs, and the student's answer to this question. If the student added
cells below the question's test, the question is judged once more without them, because they ran later in the
notebook. A check counts if it passes in any of these attempts. So a cell that crashes, hangs or exits costs
only its own question, and each loss by time or memory has occurred alone.

A submission that has exceeded ``MOST_TOGETHER`` limits is hardly honest, and its other questions are judged
alone first. All cells together are a second try only for what failed in another way than by its time, so that
an endless loop in each answer costs one short limit for each question.

In each attempt the visible checks of all questions run before the hidden ones. So no process that has seen
the inputs of a hidden check answers a visible one, whose message the student reads. An attempt that holds the
course's solutions is marked: its messages are published without what the student's process chose.

The quiz needs no other cell, and a second try would be a second answer. Its answers are read once; they are
read again only if they could not be read.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.calculation import calculated_by
from dlo_lib.grading.checks.contract import Check, Student
from dlo_lib.grading.checks.outcome import Ended, Outcome, Status, run_check, seed_for
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.judge.attempt import Attempt, RemoteStudent
from dlo_lib.grading.judge.calculator import Calculator
from dlo_lib.grading.judge.cells import Origin, Submission, SubmissionCell
from dlo_lib.grading.judge.intake import Invalid, open_notebook, read_notebook
from dlo_lib.grading.judge.lab_zygote import zygote_for as zygote_for
from dlo_lib.grading.judge.own_limits import OwnTime, memory_reason
from dlo_lib.grading.judge.report import (
    NO_ATTEMPT,
    QuestionReport,
    Report,
    check_report,
    overall_status,
    question_report,
)
from dlo_lib.grading.judge.time_budget import TimeBudget
from dlo_lib.grading.lab.course import course_root, find_lab, labs
from dlo_lib.grading.lab.modules import LabChecks, load_checks
from dlo_lib.grading.lab.released_lab import released_lab
from dlo_lib.grading.lab.source import TEST_PREFIX, CellKind, LabSource
from dlo_lib.grading.sandbox.host import Zygote

MAX_LEFT_OUT = 2  # added cells that are found and left out one by one; after that, all of them are left out
MAX_TIMEOUTS = 2  # of one question judged alone; its other checks then count as timed out
MOST_TOGETHER = 2  # limits that a submission exceeds until its other questions are judged alone first
ABNORMAL = (Status.TIMEOUT, Status.OOM, Status.KERNEL_DIED)
Outcomes = TypeVar("Outcomes")


def judge_notebook(
    path: str | Path, lab: LabSource, secret: str, zygote: Zygote, visible_only: bool = False
) -> Report:
    """Judge the notebook at ``path`` as a submission to ``lab``.

    Args:
        secret: the class secret, from which the inputs of checks are drawn.
        zygote: from :func:`zygote_for`; the caller closes it.
        visible_only: leave out the hidden checks.

    Returns:
        A report for any file; if the file cannot be graded, its status is ``INVALID(reason)``.
    """
    checks = load_checks(lab.given, None if visible_only else lab.folder)
    opened = open_submission(Path(path), lab, checks)
    return opened if isinstance(opened, Report) else Judge(lab, checks, secret, zygote).judge(*opened)


def open_submission(path: Path, lab: LabSource, checks: LabChecks) -> tuple[Submission, list[str]] | Report:
    """Return the submission in the notebook at ``path`` with warnings, or its report if there is nothing to
    run.
    """
    return open_and_keep(path, lab, checks)[1]


def open_and_keep(
    path: Path, lab: LabSource, checks: LabChecks
) -> tuple[Submission | None, tuple[Submission, list[str]] | Report]:
    """Return the submission in the notebook at ``path``, None if it cannot be read; and the same as
    :func:`open_submission`.
    """
    try:
        submission, warnings = open_notebook(path, lab)
    except Invalid as error:
        return None, empty_report(lab, checks, f"INVALID({error})")
    except MemoryError:
        return None, empty_report(lab, checks, f"INVALID({memory_reason()})")
    if not submission.attempted:
        return submission, empty_report(lab, checks, NO_ATTEMPT)
    return submission, (submission, warnings)


def reference_submission(lab: LabSource, answers: Mapping[str, str] | None = None) -> Submission:
    """Return a submission of the reference solution.

    ``answers`` replaces the answers to some questions; then only these are attempted.
    """
    given = dict(answers or {})
    cells = tuple(
        SubmissionCell(
            cell.id,
            Origin.ANSWER if cell.kind is CellKind.SOLUTION else Origin.GIVEN,
            given.get(cell.id, cell.source),
        )
        for cell in lab.cells
        if cell.kind in (CellKind.GIVEN, CellKind.SOLUTION)
    )
    return Submission(cells, frozenset(given or lab.questions), frozenset(), ())


def judge_answer(
    lab: LabSource,
    question: str,
    answer: str,
    zygote: Zygote,
    secret: str = "mutants",
    only: Collection[str] | None = None,
) -> QuestionReport:
    """Judge ``answer`` to one question alone, with the reference solutions of the steps it needs.

    ``only``: the names of the checks to run; by default all checks of the question.
    """
    submission = reference_submission(lab, {question: answer})
    checks = load_checks(lab.given, lab.folder)
    judge = Judge(lab, checks if only is None else checks.only(only), secret, zygote)
    try:
        return judge.question(question, submission, judge.judge_alone(question, submission))
    finally:
        judge.calculator.close()


def visible_report(notebook: str | Path) -> Report:
    """Run the visible checks on a notebook as the judge does, but with random inputs; needs no solutions.

    Raises:
        UserError: the notebook cannot be read, or its lab is not one of this course.
    """
    path = Path(notebook).parent.resolve() / Path(notebook).name
    try:
        name = read_notebook(path).get("metadata", {}).get("dlo", {}).get("lab") or path.resolve().parent.name
    except Invalid as error:
        raise UserError(f"{path} cannot be checked: {error}") from error
    except AttributeError:
        name = path.resolve().parent.name
    info = find_lab(str(name), labs())
    lab = released_lab(course_root() / "labs" / info.directory)
    checks = load_checks(lab.given)
    opened = open_submission(path, lab, checks)
    if isinstance(opened, Report):
        return opened
    with zygote_for(lab) as zygote:
        return Judge(lab, checks, secrets.token_hex(8), zygote).judge(*opened)


class Judge:
    """Judges one submission in several attempts."""

    def __init__(
        self,
        lab: LabSource,
        checks: LabChecks,
        secret: str,
        zygote: Zygote,
        reference: Mapping[str, float] | None = None,
        own_time: OwnTime | None = None,
    ) -> None:
        """
        Args:
            reference: seconds of the reference solution by check, if they are known.
            own_time: the time of this process, which :meth:`OwnTime.limited` limits; None: it is not limited.
        """
        self.lab, self.checks, self.secret, self.zygote = lab, checks, secret, zygote
        self.budget = TimeBudget(reference)
        self.own_time = own_time or OwnTime()
        self.calculator = Calculator(zygote, self.budget)
        self.crowded = False  # a process ran out of time or memory because of other submissions
        self.seconds: dict[str, float] = {}  # of computing or sleeping, by check
        self.cut = False
        self.quiz_read = False
        self.computed = 0.0  # CPU time of the student's processes in seconds
        self.outside = 0.0  # and outside of questions: their starts
        self.left_out: list[str] = []

    def judge(self, submission: Submission, warnings: Sequence[str] = ()) -> Report:
        """Return the report of ``submission``; ``warnings``, those of the intake, precede its warnings."""
        try:
            questions = self._questions(submission)
        finally:
            self.calculator.close()
        notes = [*warnings, *submission.warnings, *([tr("long output was cut")] if self.cut else [])]
        text = "a cell that you added (`{cell}`) ended the process: it was left out"
        notes += [tr(text, cell=cell) for cell in self.left_out]
        notes += [self.own_time.reason] if self.own_time.spent else []
        return Report(
            self.lab.info.directory, overall_status(questions, tuple(notes)), questions, tuple(notes)
        )

    def _questions(self, submission: Submission) -> dict[str, QuestionReport]:
        together = self.judge_together(submission)
        questions = {}
        for question in self.lab.questions:
            outcomes = together.get(question, {})
            for left_out in self._left_out_alone(question, submission):
                if outcomes and all(outcome.passed for outcome in outcomes.values()):
                    break
                if question != QUIZ:
                    alone = self.judge_alone(question, submission, outcomes, left_out)
                    outcomes = _best_outcomes(outcomes, alone)
                elif not self.quiz_read:
                    outcomes = self.judge_alone(question, submission, left_out=left_out)
            if question != QUIZ and question not in together and _may_pass(outcomes):
                second = self.judge_together(submission, question)
                outcomes = _best_outcomes(second.get(question, {}), outcomes)
            questions[question] = self.question(question, submission, outcomes)
        return questions

    def judge_together(self, submission: Submission, only: str = "") -> dict[str, dict[str, Outcome]]:
        """Run all checks of the attempted questions, or of one of them, on all cells in order.

        Returns:
            Question → check → outcome, without the questions that are judged alone first.
        """
        chosen = submission.attempted & {only} if only else submission.attempted
        checks = {name: self.checks.of(name) for name in self.lab.questions if name in chosen}
        most = math.inf if only else MOST_TOGETHER
        found = self._attempt(submission.cells, lambda at: self._run(at, checks, 1, most))
        return {question: outcomes for question, outcomes in found.items() if outcomes}

    def judge_alone(
        self,
        question: str,
        submission: Submission,
        before: Mapping[str, Outcome] | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> dict[str, Outcome]:
        """Run the checks of ``question`` that did not pass before, without the student's other answers.

        Of the visible checks and of the hidden ones, those that timed out before run last.
        """
        before = before or {}
        checks = [
            check
            for check in self.checks.of(question)
            if check.name not in before or not before[check.name].passed
        ]
        checks.sort(key=lambda check: check.name in before and before[check.name].status is Status.TIMEOUT)
        cells = [cell for cell in self._cells_alone(question, submission) if cell.id not in left_out]
        timeouts = MAX_TIMEOUTS if self.budget.exceeded < MAX_TIMEOUTS else 1
        return self._attempt(cells, lambda at: self._run(at, {question: checks}, timeouts)[question])

    def question(self, question: str, submission: Submission, outcomes: dict[str, Outcome]) -> QuestionReport:
        """Return the report of a question."""
        absent = tr("not attempted")
        withdrawn = question in submission.references
        reports = []
        for check in self.checks.of(question):
            outcome = outcomes.get(check.name, Outcome(check, Status.NOT_WRITTEN, absent, absent))
            reports.append(check_report(outcome, check in self.checks.hidden, withdrawn))
        note = (
            tr('answered by lab.use_reference("{question}"): no points', question=question)
            if withdrawn
            else ""
        )
        return question_report(question, tuple(reports), note, question in submission.attempted)

    def _run(
        self,
        attempt: Attempt,
        checks: Mapping[str, Sequence[Check]],
        timeouts: int,
        most_exceeded: float = math.inf,
    ) -> dict[str, dict[str, Outcome]]:
        """Return question → check → outcome; the visible checks of all questions run before the hidden ones.

        After ``timeouts`` time-outs of a question, its other checks count as timed out too. Once the
        submission has exceeded ``most_exceeded`` limits, no further question is begun.
        """
        found: dict[str, dict[str, Outcome]] = {question: {} for question in checks}
        in_order = [check for of_question in checks.values() for check in of_question]
        for check in sorted(in_order, key=lambda check: check in self.checks.hidden):
            outcomes = found[check.question]
            if not outcomes and self.budget.exceeded >= most_exceeded:
                continue
            if self.own_time.spent:
                reason = self.own_time.reason
                outcomes[check.name] = Outcome(check, Status.TIMEOUT, reason, reason, brief=reason)
                continue
            hung = [outcome for outcome in outcomes.values() if outcome.status is Status.TIMEOUT]
            if len(hung) >= timeouts:
                outcomes[check.name] = replace(hung[-1], check=check)
                continue
            student = RemoteStudent(attempt, check.question, self.budget.seconds(check))
            before = attempt.spent
            self.calculator.left = self.budget.seconds(check)
            with calculated_by(self.calculator):
                outcome = self.outcome(check, student, seed_for(self.secret, self.lab.info.directory, check))
            outcomes[check.name] = replace(outcome, solutions=attempt.holds_solutions)
            self.seconds[check.name] = max(attempt.spent - before, student.charged)
        return found

    def outcome(self, check: Check, student: Student, seed: int) -> Outcome:
        """Run one check."""
        with self.own_time.ending(lambda reason: Ended(Status.TIMEOUT, reason)):
            return run_check(check, student, seed)

    def _left_out_alone(self, question: str, submission: Submission) -> list[frozenset[str]]:
        """Return the sets of added cells to leave out when ``question`` is judged alone.

        The first set is empty. The second, if any, holds the cells below the question's test.
        """
        if question not in submission.attempted:
            return []
        places = {cell.id: place for place, cell in enumerate(self.lab.cells)}
        test = places[TEST_PREFIX + question]
        own = [cell for cell in submission.cells if cell.origin is Origin.EXTRA]
        below = frozenset(cell.id for cell in own if cell.behind is not None and places[cell.behind] >= test)
        return [frozenset(), below] if below else [frozenset()]

    def _cells_alone(self, question: str, submission: Submission) -> list[SubmissionCell]:
        needed = self.lab.info.needed_by(question)
        cells = []
        for cell in submission.cells:
            if cell.origin in (Origin.GIVEN, Origin.EXTRA) or cell.id == question:
                cells.append(cell)
            elif cell.id in needed:
                source = self.lab.solution(cell.id)
                # A student's installation has no solutions: use the student's earlier steps.
                own = source.source == source.released
                cells.append(cell if own else SubmissionCell(cell.id, Origin.SOLUTION, source.source))
        return cells

    def _attempt(self, cells: Sequence[SubmissionCell], run: Callable[[Attempt], Outcomes]) -> Outcomes:
        """Return the result of ``run`` on these cells, without added cells that end the process."""
        while True:
            attempt = Attempt(
                self.zygote,
                [cell for cell in cells if cell.id not in self.left_out],
                self.budget.load_seconds(self.lab.info.load_seconds),
                self.budget,
            )
            calculated = self.calculator.computed
            try:
                outcomes = run(attempt)
            finally:
                self.cut = self.cut or attempt.cut
                self.quiz_read = self.quiz_read or attempt.quiz is not None
                attempt.close()
                self.computed += attempt.computed + self.calculator.computed - calculated
                self.outside += attempt.outside
                self.crowded = self.crowded or attempt.crowded
            own = [cell.id for cell in attempt.cells if cell.origin is Origin.EXTRA]
            if attempt.broken_in not in own:
                return outcomes
            self.left_out += [attempt.broken_in] if len(self.left_out) < MAX_LEFT_OUT else own


def _may_pass(outcomes: Mapping[str, Outcome]) -> bool:
    """Return True if a question has failed, and none of its checks by its time or memory."""
    statuses = {outcome.status for outcome in outcomes.values()}
    return not statuses <= {Status.OK} and statuses.isdisjoint((Status.TIMEOUT, Status.OOM))


def _best_outcomes(first: dict[str, Outcome], second: dict[str, Outcome]) -> dict[str, Outcome]:
    """Combine two attempts: a check passes if it passes in either.

    Of two failures the second, alone, counts, unless the first is an ordinary wrong answer.
    """
    best = dict(first)
    for name, outcome in second.items():
        if outcome.passed or name not in best or best[name].status in (*ABNORMAL, Status.NOT_WRITTEN):
            best[name] = outcome
    return best


def empty_report(lab: LabSource, checks: LabChecks, status: str) -> Report:
    """Return the report of a submission in which nothing was run."""
    absent = tr("not attempted") if status == NO_ATTEMPT else tr("the notebook cannot be read")
    questions = {}
    for question in lab.questions:
        reports = tuple(
            check_report(Outcome(check, Status.NOT_WRITTEN, absent, absent), check in checks.hidden)
            for check in checks.of(question)
        )
        questions[question] = question_report(question, reports, attempted=False)
    return Report(lab.info.directory, status, questions)
