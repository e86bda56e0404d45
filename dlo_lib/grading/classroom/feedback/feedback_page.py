"""The feedback page of a student: points and check messages by question, hints, plots, and the receipt.

The page is one HTML file without scripts and external files, so that it can be mailed, archived, and read on
a telephone. All text in it is escaped, and its content security policy forbids scripts. About a hidden check
it contains only the words of the check's author, because the report contains no more. Before the due date,
messages about visible checks name no inputs either.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache, partial

from jinja2 import Environment
from markupsafe import Markup

from dlo_lib.base.markup import code_html, environment, message_html
from dlo_lib.base.text import language, tr
from dlo_lib.grading.classroom.feedback.comment import comment_html
from dlo_lib.grading.classroom.feedback.pictures import Plots
from dlo_lib.grading.judge.report import GRADED, GRADED_WARN, GRADER_ERROR, NO_ATTEMPT

UNREADABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
LONGEST_TEXT = 4_000


@dataclass(frozen=True)
class CheckLine:
    """One check, as the student reads it."""

    title: str
    points: float
    maximum: float
    passed: bool
    says: str


@dataclass(frozen=True)
class QuestionCard:
    """A question: ``heading`` of its section in the lab, ``said`` about its points, ``comment`` of the
    instructor.
    """

    name: str
    heading: str
    points: float
    maximum: float
    said: str
    checks: tuple[CheckLine, ...]
    note: str
    comment: str
    hints: tuple[str, ...]

    @property
    def colour(self) -> str:
        """The style class of the points."""
        return "good" if self.points >= self.maximum else "part" if self.points > 0 else "bad"


@dataclass(frozen=True)
class ReceiptCard:
    """The receipt of a submission; ``replaced``: the time of the one that it replaces; ``reason`` if there is
    no notebook to make one of.
    """

    student: str
    notebook: str
    size: int
    submitted: str
    late: str
    sha256: str
    reason: str = ""
    replaced: str = ""

    @property
    def command(self) -> str:
        """The command that prints the same receipt on the student's computer."""
        return f"dlo receipt {shlex.quote(self.notebook)}"


@dataclass(frozen=True)
class Page:
    """The content of a feedback page. Points are the gradebook's, after manual grading and the late
    penalty.
    """

    student: str
    lab: str
    title: str
    total: float
    maximum: float
    penalty: float
    status: str
    warnings: tuple[str, ...]
    questions: tuple[QuestionCard, ...]
    read: tuple[str, ...]
    pictures: Plots
    early: bool = False
    """Others may still submit, so the messages name no inputs."""
    entry: str = ""
    """The student's name on the leaderboard; empty if the lab has none."""

    @property
    def share(self) -> float:
        """The points earned, in per cent."""
        return max(0.0, min(100.0, 100 * self.total / self.maximum)) if self.maximum else 0.0

    @property
    def status_meaning(self) -> str:
        """The meaning of the status."""
        return explain_status(self.status)


def feedback_html(page: Page, receipt: ReceiptCard) -> str:
    """Return the feedback page as HTML."""
    return (
        _environment()
        .get_template("feedback.html.j2")
        .render(page=page, receipt=receipt, language=language())
    )


def receipt_html(lab: str, receipt: ReceiptCard) -> str:
    """Return the page that only confirms the submission, as HTML."""
    return (
        _environment().get_template("receipt.html.j2").render(lab=lab, receipt=receipt, language=language())
    )


def explain_status(status: str) -> str:
    """Return the meaning of a status of the judge, in a sentence for the student."""
    word = re.split(r"[ (]", status, maxsplit=1)[0]
    return {
        GRADED: tr("Your notebook was judged: every question by its checks."),
        GRADED_WARN: tr(
            "Your notebook was judged. Something about the file was unusual, see below; it cost no points.",
        ),
        NO_ATTEMPT: tr(
            "No answer differs from the notebook that you were given, so there was nothing to judge.",
        ),
        GRADER_ERROR: tr(
            "The grader failed here, not you. Tell your instructor: the points of this page are not final.",
        ),
        "INVALID": tr(
            "The file could not be read as a notebook, for the reason in brackets, so nothing was judged.",
        ),
        "TIMEOUT": tr(
            "Code of a question did not finish in time, even alone. The other questions were judged.",
        ),
        "OOM": tr(
            "Code of a question exceeded the memory limit, even alone. The other questions were judged.",
        ),
        "KERNEL_DIED": tr("Code of a question ended its own process. The other questions were judged."),
    }.get(word, tr("See the questions below."))


def to_markup(text: str) -> Markup:
    """Escape plain text for the page, remove control and direction characters, and mark up `code`."""
    plain = UNREADABLE.sub("", text)
    short = plain if len(plain) <= LONGEST_TEXT else plain[:LONGEST_TEXT] + " …"
    return code_html(short)


@cache
def _environment() -> Environment:
    made = environment("dlo_lib.grading.classroom.feedback")
    made.filters["marked"] = to_markup
    made.filters["comment"] = comment_html
    made.filters["message"] = partial(message_html, inline=to_markup)
    return made
