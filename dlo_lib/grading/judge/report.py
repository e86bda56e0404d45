"""The judge's report of a submission: plain values without times and paths, equal for equal submissions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dlo_lib.grading.checks.status import Status
from dlo_lib.grading.checks.verdict import published

if TYPE_CHECKING:
    from dlo_lib.grading.checks.outcome import Outcome

GRADED, GRADED_WARN, NO_ATTEMPT, GRADER_ERROR = "GRADED", "GRADED_WARN", "NO_ATTEMPT", "GRADER_ERROR"
NOT_GRADED = "NOT_GRADED"
"""The status of a submission that is collected and not judged yet."""
REFUSED = "REFUSED"
"""The status of a submission that the collection refused; the inventory has the reason."""
WORST_FIRST = (Status.GRADER_ERROR, Status.OOM, Status.KERNEL_DIED, Status.TIMEOUT)


@dataclass(frozen=True)
class CheckReport:
    """The result of one check.

    Attributes:
        message: for instructors.
        published: for the student.
        early: for the student while others may still submit, because it names no input of the check.
        measured: JSON values that the check itself measured, for a leaderboard.
    """

    name: str
    title: str
    points: float
    maximum: float
    status: str
    message: str
    published: str
    hidden: bool
    early: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QuestionReport:
    """A question's points and checks. ``note`` gives another reason for the points."""

    question: str
    points: float
    maximum: float
    status: str
    checks: tuple[CheckReport, ...]
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A submission's status, with a reason in brackets if it has one, its questions in order, and
    warnings.
    """

    lab: str
    status: str
    questions: dict[str, QuestionReport]
    warnings: tuple[str, ...] = ()

    @property
    def points(self) -> float:
        """The points earned."""
        return sum(question.points for question in self.questions.values())

    @property
    def maximum(self) -> float:
        """The points of all checks."""
        return sum(question.maximum for question in self.questions.values())


def student_view(report: Report) -> dict[str, Any]:
    """Return the report as plain values for JSON, with only what the student may read."""
    questions = {
        name: replace(
            question, checks=tuple(replace(check, message=check.published) for check in question.checks)
        )
        for name, question in report.questions.items()
    }
    values: dict[str, Any] = json.loads(json.dumps(asdict(replace(report, questions=questions))))
    return values


def check_report(outcome: Outcome, hidden: bool, withdrawn: bool = False) -> CheckReport:
    """Return the report of an outcome; ``withdrawn``: its points do not count."""
    shown = published(outcome, frozenset({outcome.check.name}) if hidden else frozenset())
    if outcome.status is Status.GRADER_ERROR:  # an exception of the judge: its text is for instructors
        shown = outcome.words
    check = outcome.check
    return CheckReport(
        name=check.name,
        title=check.title,
        points=0.0 if withdrawn else outcome.points,
        maximum=check.points,
        status=outcome.status.value,
        message=outcome.message,
        published=shown,
        hidden=hidden,
        early=outcome.words if hidden else outcome.brief or outcome.words,
        measured=outcome.measured,
    )


def question_report(
    question: str, checks: tuple[CheckReport, ...], note: str = "", attempted: bool = True
) -> QuestionReport:
    """Return the report of a question, combined from the reports of its checks."""
    statuses = {check.status for check in checks}
    status = next(
        (word.value for word in WORST_FIRST if word.value in statuses), GRADED if attempted else NO_ATTEMPT
    )
    return QuestionReport(
        question,
        sum(check.points for check in checks),
        sum(check.maximum for check in checks),
        status,
        checks,
        note,
    )


def overall_status(questions: dict[str, QuestionReport], warnings: tuple[str, ...]) -> str:
    """Return the status of the whole submission: the worst of its questions, else whether there are
    warnings.
    """
    statuses = {question.status for question in questions.values()}
    worst = next((word.value for word in WORST_FIRST if word.value in statuses), None)
    return worst or (GRADED_WARN if warnings else GRADED)
