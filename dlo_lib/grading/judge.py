"""The judge: a notebook goes in, a report comes out. Checks run in this process, the student's code in others.

No carry-over: first all cells run in order; then each question that lost points is judged alone, with the given cells, the source's own
answers to the steps it needs, and the student's answer to this one; where cells of the student's own stand below the question's test, once
more without these, for in the notebook they came later. Points count where any gave them. So one cell that crashes, hangs or leaves costs
its own question and no other; and a loss by time or memory has been seen twice, the second time alone.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dlo_lib.errors import UserError
from dlo_lib.grading.attempt import Attempt, RemoteStudent
from dlo_lib.grading.cells import Origin, Submission, TakenCell
from dlo_lib.grading.contract import Check
from dlo_lib.grading.course import course_root, find_lab, labs
from dlo_lib.grading.host import Zygote
from dlo_lib.grading.intake import Invalid, open_notebook, read_notebook
from dlo_lib.grading.lab_zygote import zygote_for as zygote_for
from dlo_lib.grading.modules import LabChecks, load_checks
from dlo_lib.grading.mutants import Mutant, read_mutant
from dlo_lib.grading.outcome import Outcome, Status, run_check, seed_for
from dlo_lib.grading.released import released_lab
from dlo_lib.grading.report import NO_ATTEMPT, QuestionReport, Report, check_report, overall_status, question_report
from dlo_lib.grading.source import TEST_PREFIX, CellKind, LabSource
from dlo_lib.text import tr

MAX_LEFT_OUT = 2  # cells of a student's own that are found out one by one; after that all of them are left out
MAX_TIMEOUTS = 2  # of one question judged alone: then its other checks are not waited for
VIOLENT = (Status.TIMEOUT, Status.OOM, Status.KERNEL_DIED)
Outcomes = TypeVar("Outcomes")
_warm: dict[Path, tuple[LabSource, Zygote]] = {}


def warm_zygote(lab: LabSource) -> Zygote:
    """The zygote of ``lab`` that this process keeps until its end, so that the notebooks of a class do not each wait for one."""
    known = _warm.get(lab.folder)
    if known is None or known[0] != lab or not known[1].alive:
        if known is not None:
            known[1].close()
        _warm[lab.folder] = (lab, zygote_for(lab).wait())
        atexit.register(_warm[lab.folder][1].close)
    return _warm[lab.folder][1]


def judge_notebook(path: str | Path, lab: LabSource, secret: str, visible_only: bool = False, zygote: Zygote | None = None) -> Report:
    """Judge the notebook at ``path`` as a submission to ``lab``.

    Args:
        secret: of the class; the inputs of checks are drawn from it.
        visible_only: leave the hidden checks out.
        zygote: of :func:`zygote_for`; by default :func:`warm_zygote`'s.

    Returns:
        A report for any file whatsoever; one that cannot be graded is ``INVALID(reason)``.
    """
    checks = load_checks(lab.folder, None if visible_only else lab.folder)
    opened = open_submission(Path(path), lab, checks)
    return opened if isinstance(opened, Report) else Judge(lab, checks, secret, zygote or warm_zygote(lab)).judge(*opened)


def open_submission(path: Path, lab: LabSource, checks: LabChecks) -> tuple[Submission, list[str]] | Report:
    """What is to be judged of the notebook at ``path``, with warnings; or its report, when there is nothing in it that could be run."""
    try:
        submission, warnings = open_notebook(path, lab)
    except Invalid as error:
        return _nothing(lab, checks, f"INVALID({error})")
    return (submission, warnings) if submission.attempted else _nothing(lab, checks, NO_ATTEMPT)


def reference_submission(lab: LabSource, answers: Mapping[str, str] | None = None) -> Submission:
    """The source's own answers, handed in; ``answers`` replaces those of some questions and makes only them attempted."""
    given = dict(answers or {})
    cells = tuple(
        TakenCell(cell.id, Origin.ANSWER if cell.kind is CellKind.SOLUTION else Origin.GIVEN, given.get(cell.id, cell.source))
        for cell in lab.cells
        if cell.kind in (CellKind.GIVEN, CellKind.SOLUTION)
    )
    return Submission(cells, frozenset(given or lab.questions), frozenset(), ())


def judge_mutant(lab: LabSource, mutant: Mutant | Path, secret: str = "mutants", zygote: Zygote | None = None) -> Report:
    """Judge only the question of a mutant, with its code as the answer and the source's own for the steps it needs."""
    planted = read_mutant(mutant) if isinstance(mutant, Path) else mutant
    submission = reference_submission(lab, {planted.question: planted.source})
    judge = Judge(lab, load_checks(lab.folder, lab.folder), secret, zygote or warm_zygote(lab))
    report = judge.question(planted.question, submission, judge.alone(planted.question, submission))
    return Report(lab.info.directory, overall_status({report.question: report}, ()), {report.question: report})


def visible_report(notebook: str | Path) -> Report:
    """The visible checks on a student's own notebook, as the judge runs them but with random inputs; needs no solutions.

    Raises:
        UserError: the notebook cannot be read, or it is not of a lab of this course.
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
    return judge_notebook(path, lab, secrets.token_hex(8), visible_only=True)


class Judge:
    """The attempts at one submission."""

    def __init__(self, lab: LabSource, checks: LabChecks, secret: str, zygote: Zygote) -> None:
        self.lab, self.checks, self.secret, self.zygote = lab, checks, secret, zygote
        self.cut = False
        self.computed = 0.0  # seconds of CPU time of the student's processes
        self.left_out: list[str] = []

    def judge(self, submission: Submission, warnings: Sequence[str] = ()) -> Report:
        """The report of ``submission``; ``warnings`` of whoever found it go before its own."""
        together = self.together(submission)
        questions = {}
        for question in self.lab.questions:
            outcomes = together.get(question, {})
            for left_out in self._left_out_alone(question, submission):
                if not all(outcome.passed for outcome in outcomes.values()):
                    outcomes = _union(outcomes, self.alone(question, submission, outcomes, left_out))
            questions[question] = self.question(question, submission, outcomes)
        notes = [*warnings, *submission.warnings, *([tr("long output was cut")] if self.cut else [])]
        notes += [tr("a cell of your own (`{cell}`) ended the process: it was left out", cell=cell) for cell in self.left_out]
        return Report(self.lab.info.directory, overall_status(questions, tuple(notes)), questions, tuple(notes))

    def together(self, submission: Submission) -> dict[str, dict[str, Outcome]]:
        """All checks of the attempted questions on all cells in order: question → check → outcome."""
        attempted = [question for question in self.lab.questions if question in submission.attempted]
        return self._attempt(submission.cells, lambda at: {question: self._run(at, self.checks.of(question), 1) for question in attempted})

    def alone(
        self, question: str, submission: Submission, before: Mapping[str, Outcome] | None = None, left_out: frozenset[str] = frozenset()
    ) -> dict[str, Outcome]:
        """The checks of ``question`` that it did not pass before, with no other answer of the student's; what hung goes last."""
        before = before or {}
        checks = [check for check in self.checks.of(question) if check.name not in before or not before[check.name].passed]
        checks.sort(key=lambda check: check.name in before and before[check.name].status is Status.TIMEOUT)
        cells = [cell for cell in self._cells_alone(question, submission) if cell.id not in left_out]
        return self._attempt(cells, lambda at: self._run(at, checks, MAX_TIMEOUTS))

    def question(self, question: str, submission: Submission, outcomes: dict[str, Outcome]) -> QuestionReport:
        """The report of a question."""
        absent = tr("not attempted")
        withdrawn = question in submission.references
        reports = []
        for check in self.checks.of(question):
            outcome = outcomes.get(check.name, Outcome(check, Status.NOT_WRITTEN, absent, absent))
            reports.append(check_report(outcome, check in self.checks.hidden, withdrawn))
        note = tr('answered by lab.use_reference("{question}"): no points', question=question) if withdrawn else ""
        return question_report(question, tuple(reports), note, question in submission.attempted)

    def _run(self, attempt: Attempt, checks: Iterable[Check], timeouts: int) -> dict[str, Outcome]:
        """Outcomes by check. After so many time-outs the rest shares their fate."""
        outcomes: dict[str, Outcome] = {}
        for check in checks:
            hung = [outcome for outcome in outcomes.values() if outcome.status is Status.TIMEOUT]
            if len(hung) >= timeouts:
                outcomes[check.name] = replace(hung[-1], check=check)
                continue
            student = RemoteStudent(attempt, check.question, check.seconds)
            outcomes[check.name] = run_check(check, student, seed_for(self.secret, self.lab.info.directory, check))
        return outcomes

    def _left_out_alone(self, question: str, submission: Submission) -> list[frozenset[str]]:
        """The own cells without which ``question`` is judged alone: none, then those below its test, if there are any."""
        if question not in submission.attempted:
            return []
        places = {cell.id: place for place, cell in enumerate(self.lab.cells)}
        test = places[TEST_PREFIX + question]
        own = [cell for cell in submission.cells if cell.origin is Origin.EXTRA]
        below = frozenset(cell.id for cell in own if cell.behind is not None and places[cell.behind] >= test)
        return [frozenset(), below] if below else [frozenset()]

    def _cells_alone(self, question: str, submission: Submission) -> list[TakenCell]:
        needed = _needed(self.lab, question)
        cells = []
        for cell in submission.cells:
            if cell.origin in (Origin.GIVEN, Origin.EXTRA) or cell.id == question:
                cells.append(cell)
            elif cell.id in needed:
                source = self.lab.solution(cell.id)
                # A student's installation has no solutions: there the student's own earlier steps must do.
                own = source.source == source.released
                cells.append(cell if own else TakenCell(cell.id, Origin.GIVEN, source.source))
        return cells

    def _attempt(self, cells: Sequence[TakenCell], run: Callable[[Attempt], Outcomes]) -> Outcomes:
        """What ``run`` finds on these cells. A cell of the student's own that ends the process is left out from there on."""
        while True:
            attempt = Attempt(self.zygote, [cell for cell in cells if cell.id not in self.left_out], self.lab.info.load_seconds)
            try:
                outcomes = run(attempt)
            finally:
                self.cut = self.cut or attempt.cut
                attempt.close()
                self.computed += attempt.computed
            own = [cell.id for cell in attempt.cells if cell.origin is Origin.EXTRA]
            if attempt.broken_in not in own:
                return outcomes
            self.left_out += [attempt.broken_in] if len(self.left_out) < MAX_LEFT_OUT else own


def _union(first: dict[str, Outcome], second: dict[str, Outcome]) -> dict[str, Outcome]:
    """Passed in either; of two failures the one alone counts, unless the first already was a plain wrong answer."""
    best = dict(first)
    for name, outcome in second.items():
        if outcome.passed or name not in best or best[name].status in (*VIOLENT, Status.NOT_WRITTEN):
            best[name] = outcome
    return best


def _needed(lab: LabSource, question: str) -> set[str]:
    """The earlier questions that ``question`` stands on, and those that they stand on."""
    direct = set(lab.info.needs.get(question, ()))
    return direct.union(*(_needed(lab, name) for name in direct))


def _nothing(lab: LabSource, checks: LabChecks, status: str) -> Report:
    """The report of a submission of which nothing was run."""
    questions = {}
    for question in lab.questions:
        reports = tuple(check_report(Outcome(check, Status.NOT_WRITTEN), check in checks.hidden) for check in checks.of(question))
        questions[question] = question_report(question, reports, attempted=False)
    return Report(lab.info.directory, status, questions)
