"""Prove a lab before its release: its checks must pass the solution, and fail the untouched notebook,
answers that do nothing, and every mutant.

A rule of :data:`STATIC_RULES` reads files and runs nothing; the four proofs call the judge. Each returns the
faults it found, one line with the cure per fault, or none. ``dlo release`` and the tests apply the same
functions to every lab. Cost: about a second per mutant.

Checks draw their inputs from the class secret. A proof with one secret does not show that a check catches its
mutants in each class; :func:`proof_secrets` gives more secrets for an author who has changed a lab.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.outcome import Status
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.judge.cells import Submission
from dlo_lib.grading.judge.judge import Judge, judge_answer, open_submission
from dlo_lib.grading.judge.report import GRADED, Report, overall_status
from dlo_lib.grading.judge.unused_messages import GuardedJudge
from dlo_lib.grading.lab.course import source_labs
from dlo_lib.grading.lab.lint import lint_lab
from dlo_lib.grading.lab.modules import LabChecks, load_checks
from dlo_lib.grading.lab.mutants import Idle, Mutant, idle_answer, read_mutants
from dlo_lib.grading.lab.references import undeclared_needs
from dlo_lib.grading.lab.release import NEVER, check_in_step, present_files, release_notebook
from dlo_lib.grading.lab.source import (
    BEGIN,
    END,
    CellKind,
    LabSource,
    notebook_text,
    source_notebook,
    text_source,
)
from dlo_lib.grading.lab.text_rules import exercise_faults, hint_faults, page_faults, prediction_faults
from dlo_lib.grading.sandbox.host import Zygote

LEAST_MUTANTS = 5
MOST_HIDDEN = 0.25  # of the points of a lab
MAX_FILES = 10
HINTS = 3
SECRET = "proof"  # any value: the proofs must hold for every class secret

Rule = Callable[[LabSource], list[str]]


@dataclass(frozen=True)
class Proof:
    """A rule or a proof, such as ``mutant off_by_one``, and the faults that it found."""

    name: str
    faults: tuple[str, ...]


def prove(lab: LabSource, zygote: Zygote, secrets: Sequence[str] = (SECRET,)) -> Iterator[Proof]:
    """Yield the result of each rule, then of each proof by the judge with each class secret;
    :func:`number_of_proofs` in total.
    """
    for name, rule in STATIC_RULES.items():
        yield Proof(name, tuple(rule(lab)))
    for secret in secrets:
        of_secret = "" if secret == SECRET else f", class secret {secret}"
        yield Proof(f"reference{of_secret}", tuple(reference_faults(lab, zygote, secret)))
        yield Proof(f"untouched notebook{of_secret}", tuple(untouched_faults(lab, zygote, secret)))
        yield Proof(f"idle answers{of_secret}", tuple(idle_faults(lab, zygote, secret)))
        for mutant in read_mutants(lab.folder):
            yield Proof(f"mutant {mutant.name}{of_secret}", tuple(mutant_faults(lab, mutant, zygote, secret)))


def number_of_proofs(lab: LabSource, secrets: int = 1) -> int:
    """Return the number of results that :func:`prove` yields for this number of secrets."""
    return len(STATIC_RULES) + secrets * (3 + len(read_mutants(lab.folder)))


def proof_secrets(number: int) -> tuple[str, ...]:
    """Return ``number`` class secrets for :func:`prove`, the same ones in each call."""
    return (SECRET, *(f"{SECRET}-{index}" for index in range(2, number + 1)))


# -- proofs by the judge


def reference_faults(lab: LabSource, zygote: Zygote, secret: str = SECRET) -> list[str]:
    """Return the checks that the solution fails, and the questions in which it need not use what its ranks
    receive.

    It must pass every check. Of each question whose ranks receive data, one check must fail if nothing of it
    is used (``judge.unused_messages``).
    """
    judge = GuardedJudge(lab, _checks(lab), secret, zygote)
    report = _report(judge, source_notebook(lab.folder))
    lost = _lost(report)
    faults = [f"the solution fails {name}: {message}" for name, message in lost.items()]
    if not lost and (report.status != GRADED or report.points != lab.points):
        faults.append(f"the solution is {report.status} with {report.points:g} of {lab.points:g} points")
    return faults + [
        f"{question}: its checks pass ranks that do not use what they receive: "
        "add uses_what_arrives(t, run) to one of them, see the nudge in CHECKS.md"
        for question in judge.unguarded()
    ]


def untouched_faults(lab: LabSource, zygote: Zygote, secret: str = SECRET) -> list[str]:
    """Return the checks that give points for the released notebook.

    It must earn nothing, even if a comment in each answer makes the answer an attempt. Each question is
    judged alone, with the solutions of the steps that it needs. A check that ends there with "not written
    yet" ends in the same way where the other answers are not written either, so only the questions with
    another outcome are judged with all cells together too.
    """
    notebook = release_notebook(lab.folder)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source += "\n# I was here"
    report = _report(_UntouchedJudge(lab, _checks(lab), secret, zygote), notebook)
    given = [
        check.name for question in report.questions.values() for check in question.checks if check.points > 0
    ]
    faults = [f"{name} gives points for the untouched notebook" for name in given]
    if not given and (report.status != GRADED or report.points != 0):
        faults.append(f"the untouched notebook is {report.status} with {report.points:g} points")
    return faults


def idle_faults(lab: LabSource, zygote: Zygote, secret: str = SECRET) -> list[str]:
    """Return the checks that give points for functions that return None, or their first argument.

    What does nothing must earn nothing, also where nothing is the right answer to the inputs of a check.
    """
    faults = []
    for question in lab.questions:
        source = lab.solution(question).source
        for returns in Idle:
            answer = idle_answer(source, returns)
            if answer is None:
                continue
            report = judge_answer(lab, question, answer, zygote, secret)
            given = [check.name for check in report.checks if check.points > 0]
            faults += [f"{name} gives points for functions that return {returns.value}" for name in given]
    return faults


def mutant_faults(
    lab: LabSource, mutant: Mutant, zygote: Zygote, secret: str = SECRET, every_check: bool = True
) -> list[str]:
    """Return the fault of a mutant: it must fail the check that it names, with the message that it names, and
    no other check of its question.

    ``every_check``: if False, only the named check runs, which costs a third. It shows that the check still
    catches the mistake, but not that the others pass.
    """
    try:
        planted = mutant.planted(lab)
        only = None if every_check else [mutant.fails]
        question = judge_answer(lab, planted.question, planted.answer, zygote, secret, only)
    except UserError as error:
        return [str(error)]
    failed = {check.name: check.message for check in question.checks if check.status != Status.OK.value}
    wanted = (mutant.fails, *mutant.also) if every_check else (mutant.fails,)
    if set(failed) != set(wanted):
        found = failed or "none"
        return [
            f"mutant {mutant.title!r} should fail {', '.join(wanted)} and no other check, it fails {found}"
        ]
    got, says = failed[mutant.fails], (mutant.says,) if isinstance(mutant.says, str) else mutant.says
    if not any(text in got for text in says):
        wanted_texts = " or ".join(map(repr, says))
        return [f"mutant {mutant.title!r} should get the message {wanted_texts}, it gets {got!r}"]
    return []


class _UntouchedJudge(Judge):
    """A judge of a notebook without answers: it judges a question together with the others only if a check of
    it, alone, does not say that the answer is not written.
    """

    def judge(self, submission: Submission, warnings: Sequence[str] = ()) -> Report:
        """Return the report of ``submission``."""
        questions = {}
        for question in self.lab.questions:
            outcomes = self.judge_alone(question, submission)
            if any(outcome.status is not Status.NOT_WRITTEN for outcome in outcomes.values()):
                together = self.judge_together(submission, question)
                outcomes |= {name: outcome for name, outcome in together[question].items() if outcome.passed}
            questions[question] = self.question(question, submission, outcomes)
        return Report(self.lab.info.directory, overall_status(questions, ()), questions)


def _report(judge: Judge, notebook: NotebookNode) -> Report:
    """Return the report of ``judge`` on a notebook, read from a file as a submission is."""
    with tempfile.TemporaryDirectory(prefix="dlo-proof-") as folder:
        path = Path(folder) / judge.lab.info.notebook
        write_text(path, notebook_text(notebook))
        opened = open_submission(path, judge.lab, judge.checks)
        return opened if isinstance(opened, Report) else judge.judge(*opened)


def _lost(report: Report) -> dict[str, str]:
    checks = [check for question in report.questions.values() for check in question.checks]
    return {check.name: check.message for check in checks if check.status != Status.OK.value}


# -- static rules


def in_step_faults(lab: LabSource) -> list[str]:
    """Return the files of ``labs/`` that differ from what the source releases."""
    return check_in_step(lab.info)


def leak_faults(lab: LabSource) -> list[str]:
    """Return the files of ``labs/`` that hold a hidden check, a mutant, a source or an answer."""
    folder = lab.given
    names = sorted(present_files(folder))
    faults = [
        f"{folder / name} must never be released"
        for name in names
        if name.split("/")[0] in (*NEVER, text_source(lab.folder).name)
    ]
    for name in names:
        content = (folder / name).read_bytes()
        faults += [
            f"{folder / name} holds {mark!r}: it shows a solution"
            for mark in (BEGIN, END)
            if mark.encode() in content
        ]
    same = [
        cell.id
        for cell in lab.cells
        if cell.kind is CellKind.SOLUTION and cell.answer.split() == cell.released.split()
    ]
    return faults + [f"solution cell {name!r} is released with its answer" for name in same]


def mutants_faults(lab: LabSource) -> list[str]:
    """Return the faults of the mutants.

    There must be enough of them, each must fit the solution, and its failing check must belong to its
    question.
    """
    mutants, checks = read_mutants(lab.folder), _checks(lab)
    faults = (
        []
        if len(mutants) >= LEAST_MUTANTS
        else [f"{len(mutants)} mutants: plant at least {LEAST_MUTANTS}, see CHECKS.md"]
    )
    for mutant in mutants:
        try:
            question = mutant.planted(lab).question
        except UserError as error:
            faults.append(str(error))
            continue
        names = [check.name for check in checks.of(question)]
        if mutant.fails not in names:
            faults.append(
                f"mutant {mutant.title!r}: {mutant.fails} is no check of {question}, "
                f"which has {', '.join(names)}"
            )
    return faults


def points_faults(lab: LabSource) -> list[str]:
    """Return the questions whose points in the text of the checks differ from those of the loaded checks."""
    checks = _checks(lab)
    faults = []
    for question in dict.fromkeys([*lab.questions, *checks.questions]):
        cell = lab.test(question).points if question in lab.questions else 0.0
        of_checks = sum(check.points for check in checks.of(question))
        if cell != of_checks:
            faults.append(
                f"{question}: its test cell gives {cell:g} points, its checks {of_checks:g}: "
                "write a check as a function with @check(...)"
            )
    return faults


def help_faults(lab: LabSource) -> list[str]:
    """Return the questions without a visible check or three hints, the hints that give a solution away, and
    the checks without a title.
    """
    checks = _checks(lab)
    tried = {check.question for check in checks.visible}
    faults = [f"{question} has no visible check" for question in lab.questions if question not in tried]
    for question in dict.fromkeys([*lab.questions, *checks.hints]):
        number = len(checks.hints.get(question, ()))
        if number != HINTS or question not in lab.questions:
            faults.append(
                f"{question} has {number} hints in lab.toml: "
                f"each question has {HINTS}, a nudge, a pointer, a sketch"
            )
    own = [
        check
        for check in (*checks.visible, *checks.hidden)
        if check.function.__module__.startswith("_dlo_lab")
    ]
    faults += hint_faults(lab, checks.hints)
    return faults + [
        f"{check.name} has no docstring: students read its first line"
        for check in own
        if not inspect.getdoc(check.function)
    ]


def hidden_faults(lab: LabSource) -> list[str]:
    """Return a fault if too many points are hidden: a student who passes the visible checks has nearly all
    points.

    The right answers of the quiz do not count as hidden, because they cannot be visible.
    """
    hidden = sum(check.points for check in _checks(lab).hidden if check.question != QUIZ)
    if hidden <= MOST_HIDDEN * lab.points:
        return []
    return [
        f"{hidden:g} of {lab.points:g} points are hidden: at most {MOST_HIDDEN:.0%} may be; "
        "make each requirement that the text states a visible check"
    ]


def builds_on_faults(lab: LabSource) -> list[str]:
    """Return the labs that ``builds_on`` names and the course does not have."""
    known = {other.directory for other in source_labs()}
    return [
        f"builds_on names {name}, which is no lab of this course"
        for name in lab.info.builds_on
        if name not in known
    ]


def needs_faults(lab: LabSource) -> list[str]:
    """Return the questions whose solution calls functions of questions that ``lab.toml`` does not name.

    Only the named questions run before a question that is judged alone, and before its reference.
    """
    return undeclared_needs(lab)


def size_faults(lab: LabSource) -> list[str]:
    """A lab has few files, so that its author and its reader keep an overview."""
    files = [path for folder in lab.folders for path in folder.rglob("*")]
    number = sum(path.suffix in (".py", ".toml") for path in files)
    if number <= MAX_FILES:
        return []
    return [
        f"{number} files of code: a lab has at most {MAX_FILES}; what several labs need is in dlo_lib/labkit"
    ]


def lint_faults(lab: LabSource) -> list[str]:
    """Return the findings of the check linter."""
    return [str(finding) for finding in lint_lab(lab.given, lab.folder)]


STATIC_RULES: dict[str, Rule] = {
    "labs/ in step": in_step_faults,
    "nothing leaks": leak_faults,
    "mutants": mutants_faults,
    "points": points_faults,
    "hints and titles": help_faults,
    "hidden points": hidden_faults,
    "minutes": exercise_faults,
    "predictions": prediction_faults,
    "instructor's page": page_faults,
    "builds on": builds_on_faults,
    "needs": needs_faults,
    "number of files": size_faults,
    "check lint": lint_faults,
}


def require_proofs(lab: LabSource, proofs: list[Proof]) -> None:
    """Raise the first fault of ``proofs``, if there is one.

    Raises:
        UserError: a proof failed.
    """
    failed = [proof for proof in proofs if proof.faults]
    if failed:
        first = " ".join(failed[0].faults[0].split())
        raise UserError(
            tr("{lab} is not released: {number} of {all} proofs failed, first {name}: {fault}",
               lab=lab.info.directory, number=len(failed), all=len(proofs), name=failed[0].name, fault=first)
        )  # fmt: skip


def _checks(lab: LabSource) -> LabChecks:
    return load_checks(lab.given, lab.folder)
