"""A student's feedback as a page of its own: points and the checks' own words by question, hints, plots, and the receipt.

The page is one HTML file with no script and nothing from outside, so that it can be mailed, opened years later, and read on a telephone.
Every text in it is escaped, whoever wrote it; its content security policy allows no script at all. Of a hidden check it says what its
author wrote, and no more: the report that it is made of holds no more.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dlo_lib.grading.pictures import Pictures
from dlo_lib.grading.report import GRADED, GRADED_WARN, GRADER_ERROR, NO_ATTEMPT
from dlo_lib.text import tr

CODE = re.compile(r"`([^`\n]+)`")
UNREADABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
LONGEST_TEXT = 4_000


@dataclass(frozen=True)
class CheckLine:
    """One check as the student reads it."""

    title: str
    points: float
    maximum: float
    passed: bool
    says: str


@dataclass(frozen=True)
class QuestionCard:
    """A question: ``heading`` is the lab's own; ``said`` what happened to it; ``comment`` the instructor's."""

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
        """How the points are shown."""
        return "good" if self.points >= self.maximum else "part" if self.points > 0 else "bad"


@dataclass(frozen=True)
class ReceiptCard:
    """What was handed in; ``reason`` when there is no notebook to make a receipt of."""

    student: str
    notebook: str
    size: int
    submitted: str
    late: str
    sha256: str
    reason: str = ""

    @property
    def command(self) -> str:
        """What gives the same number on the student's own machine."""
        return f"dlo receipt {shlex.quote(self.notebook)}"


@dataclass(frozen=True)
class Page:
    """All that a feedback page says. Points are those of the gradebook, after manual grading and the penalty for lateness."""

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
    pictures: Pictures

    @property
    def share(self) -> float:
        """Points earned, in per cent."""
        return max(0.0, min(100.0, 100 * self.total / self.maximum)) if self.maximum else 0.0

    @property
    def explained(self) -> str:
        """What the status word means."""
        return explained(self.status)


def feedback_html(page: Page, receipt: ReceiptCard) -> str:
    """The feedback page."""
    return _environment().get_template("feedback.html.j2").render(page=page, receipt=receipt, language=_language())


def receipt_html(lab: str, receipt: ReceiptCard) -> str:
    """The page that says only that the work was received."""
    return _environment().get_template("receipt.html.j2").render(lab=lab, receipt=receipt, language=_language())


def explained(status: str) -> str:
    """What a status word of the judge means for the student, in a sentence."""
    word = re.split(r"[ (]", status, maxsplit=1)[0]
    return {
        GRADED: tr("Your notebook was judged: every question by its checks."),
        GRADED_WARN: tr("Your notebook was judged. Something about the file was unusual: see below; it cost no points by itself."),
        NO_ATTEMPT: tr("No answer differs from the notebook that you were given, so there was nothing to judge."),
        GRADER_ERROR: tr("The grader failed here, not you. Tell your instructor: the points of this page are not final."),
        "INVALID": tr("The file could not be read as a notebook, for the reason in brackets, so nothing was judged."),
        "TIMEOUT": tr("Code of a question did not come to an end in its time, also when it ran alone. The other questions were judged."),
        "OOM": tr("Code of a question needed more memory than the grader gives, also when it ran alone. The other questions were judged."),
        "KERNEL_DIED": tr("Code of a question ended its own process. The other questions were judged."),
    }.get(word, tr("See the questions below."))


def marked(text: str) -> Markup:
    """Plain text for the page: escaped, without what a terminal or a reader's eye could be misled by, with `code` as code."""
    plain = UNREADABLE.sub("", text)
    short = plain if len(plain) <= LONGEST_TEXT else plain[:LONGEST_TEXT] + " …"
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(short))))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dlo_lib.grading"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["marked"] = marked
    environment.globals["tr"] = tr
    return environment


def _language() -> str:
    return os.environ.get("DLO_LANG", "en")[:2].lower()
