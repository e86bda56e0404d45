"""What a student's page of feedback says: from the judge's report, the gradebook and the submission."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.coursedir import CourseDirectory

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.classroom.collect.collection import replaced_at
from dlo_lib.grading.classroom.collect.receipt import digest
from dlo_lib.grading.classroom.feedback.feedback_page import (
    CheckLine,
    Page,
    QuestionCard,
    ReceiptCard,
    feedback_html,
)
from dlo_lib.grading.classroom.feedback.leaderboard import entry_name, read_entry
from dlo_lib.grading.classroom.feedback.other_release import release_warnings
from dlo_lib.grading.classroom.feedback.pictures import pictures_of
from dlo_lib.grading.classroom.gradebook.deadlines import deadlines_of, seconds_late
from dlo_lib.grading.classroom.gradebook.submission_copy import TIMESTAMP
from dlo_lib.grading.classroom.roster.course_file import read_course_file
from dlo_lib.grading.classroom.roster.safe_files import Refused, printable, read_regular
from dlo_lib.grading.judge.cells import cell_was_missing
from dlo_lib.grading.judge.intake import MAX_BYTES, Invalid, find_submission, read_submission
from dlo_lib.grading.judge.report import GRADED, NO_ATTEMPT, CheckReport, QuestionReport, Report
from dlo_lib.grading.judge.report_store import checks_version, report_from
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.source import TEST_PREFIX, CellKind, LabSource, read_lab, source_folder
from dlo_lib.grading.lab.times import how_late


@dataclass(frozen=True)
class _Marks:
    """The gradebook's points, whether a person gave them, and comments, by question."""

    points: dict[str, float]
    by_hand: frozenset[str]
    comments: dict[str, str]
    penalty: float
    late_seconds: float
    maximum: float
    early: bool
    explain: str = "after due"
    """When the reasons of the quiz are shown, one of ``course_file.EXPLAIN``."""


def student_page(directory: CourseDirectory, info: LabInfo, student: str, graded: Path) -> str:
    """Return the feedback of ``student`` as HTML, from the graded notebook at ``graded``."""
    lab, hints = _lab_of(source_folder(info))
    dlo = nbformat.read(graded, as_version=4).metadata.get("dlo", {})
    report = (
        report_from(dlo["report"])
        if "report" in dlo
        else Report(info.directory, dlo.get("status", GRADED), {})
    )
    warnings = report.warnings
    if dlo.get("checks", "") not in ("", checks_version(lab.folder)):
        warnings = (*warnings, tr("It was judged with an earlier version of the lab's checks."))
    marks = _marks(directory, info, student)
    submitted = _parsed(submitted_file(directory, info, student), info)
    warnings = (*warnings, *release_warnings(submitted, dlo))
    missing = [name for name in lab.questions if cell_was_missing(name) in report.warnings]
    cards = tuple(
        _card(lab, question, report.questions.get(question), marks, hints, missing)
        for question in lab.questions
    )
    page = Page(
        student=student, lab=info.directory, title=info.title,
        total=max(0.0, sum(marks.points.values()) - marks.penalty), maximum=marks.maximum,
        penalty=marks.penalty,
        status=report.status, warnings=warnings, questions=cards,
        read=_read_next(lab, cards), pictures=pictures_of(submitted), early=marks.early,
        entry="" if read_entry("", report) is None else entry_name(Path(directory.root), info, student),
    )  # fmt: skip
    return feedback_html(page, receipt_card(directory, info, student, marks.late_seconds))


def receipt_card(directory: CourseDirectory, lab: LabInfo, student: str, late_seconds: float) -> ReceiptCard:
    """Return the receipt of the collected submission of ``student``."""
    notebook = submitted_file(directory, lab, student)
    submitted = plain_text(notebook.parent / TIMESTAMP, 200).removesuffix("UTC").split(".")[0].strip()
    before = replaced_at(Path(directory.root), lab, student)
    replaced = "" if before is None else f"{before:%Y-%m-%d %H:%M:%S}"
    late = tr("{time} after your due date", time=how_late(late_seconds)) if late_seconds > 0 else ""
    try:
        found, _ = find_submission(notebook, lab.directory)
        content = read_regular(found, MAX_BYTES)
    except (Invalid, Refused) as error:
        reason = tr("There is no receipt: {reason}.", reason=error)
        return ReceiptCard(student, lab.notebook, 0, submitted, late, "", reason, replaced)
    name = printable(found.name)
    return ReceiptCard(student, name, len(content), submitted, late, digest(content), replaced=replaced)


def _card(
    lab: LabSource,
    question: str,
    report: QuestionReport | None,
    marks: _Marks,
    hints: dict[str, tuple[str, ...]],
    missing: Collection[str],
) -> QuestionCard:
    points, maximum = marks.points.get(question, 0.0), lab.test(question).points
    checks = report.checks if report is not None else ()
    lines = tuple(
        CheckLine(
            tr(check.title),
            check.points,
            check.maximum,
            check.points >= check.maximum,
            _says(question, check, marks),
        )
        for check in checks
    )
    said = ""
    if report is None:
        said = tr("It was not judged.")
    elif report.status == NO_ATTEMPT:
        said, lines = tr("There was no answer of yours, so this question has no points."), ()
        if question in missing:
            said = tr("The question `{name}` was missing from your file, so it has no points.", name=question)
    if question in marks.by_hand:
        said = " ".join([said, tr("Your instructor gave these points by hand.")]).strip()
    note = report.note if report is not None else ""
    shown = hints.get(question, ()) if points < maximum else ()
    return QuestionCard(
        question,
        _heading(lab, question),
        points,
        maximum,
        said,
        lines,
        note,
        marks.comments.get(question, ""),
        shown,
    )


def _says(question: str, check: CheckReport, marks: _Marks) -> str:
    """Return the message of a check for the student. The reasons of the quiz are the same for all students,
    so the course file decides when the page has them (``course_file.EXPLAIN``)."""
    shown = check.early if marks.early else check.published
    if question != QUIZ or not check.hidden:
        return shown
    if marks.explain == "at once" or (marks.explain == "after due" and not marks.early):
        return shown
    return tr("explained after the due date") if marks.explain == "after due" else ""


def _heading(lab: LabSource, question: str) -> str:
    """Return the heading of the lab's section that contains the question."""
    heading = question
    for cell in lab.cells:
        if cell.kind is CellKind.TEXT:
            titles = [line.lstrip("#").strip() for line in cell.source.splitlines() if line.startswith("#")]
            heading = titles[-1] if titles else heading
        if cell.kind is CellKind.SOLUTION and cell.id == question:
            break
    return heading


def _read_next(lab: LabSource, cards: Iterable[QuestionCard]) -> tuple[str, ...]:
    """Return the lab's sections of the questions that lost points, and the library's files for them."""
    lost = [card for card in cards if card.points < card.maximum]
    lines = [
        tr("in the lab: section “{heading}”", heading=heading)
        for heading in dict.fromkeys(card.heading for card in lost)
    ]
    own = [f"`{module.replace('.', '/')}`" for module in lab.info.taught if module.startswith("dlo_lib.")]
    if lost and own:
        lines.append(tr("how the library does it: {files}", files=", ".join(own)))
    return tuple(lines)


def _parsed(submitted: Path, info: LabInfo) -> dict[str, Any]:
    """Return the submitted notebook; empty if there is none that can be read."""
    try:
        return read_submission(submitted, info.directory)[1]
    except Invalid:
        return {}


def _marks(directory: CourseDirectory, info: LabInfo, student: str) -> _Marks:
    explain = read_course_file(directory.root).quiz_explain
    with Gradebook(directory.db_url, directory.course_id) as gradebook:
        maximum = gradebook.find_notebook(info.name, info.directory).max_score
        deadlines = deadlines_of(gradebook, info.directory, directory.root)
        early = is_before(deadlines.last)
        try:
            notebook = gradebook.find_submission_notebook(info.name, info.directory, student)
        except MissingEntry:
            return _Marks({}, frozenset(), {}, 0.0, 0.0, maximum, early, explain)
        points = {grade.name.removeprefix(TEST_PREFIX): grade.score for grade in notebook.grades}
        by_hand = frozenset(
            grade.name.removeprefix(TEST_PREFIX)
            for grade in notebook.grades
            if grade.manual_score is not None
        )
        comments = {
            comment.name: comment.manual_comment for comment in notebook.comments if comment.manual_comment
        }
        late = seconds_late(notebook.assignment, deadlines)
        penalty = notebook.late_submission_penalty or 0.0
        return _Marks(points, by_hand, comments, penalty, late, maximum, early, explain)


def is_before(due: datetime | None) -> bool:
    """Return True if ``due``, a time with its zone, has not passed."""
    return due is not None and datetime.now(UTC) < due


def _lab_of(folder: Path) -> tuple[LabSource, dict[str, tuple[str, ...]]]:
    return _read(folder, max(path.stat().st_mtime_ns for path in folder.iterdir()))


@lru_cache(maxsize=4)
def _read(folder: Path, modified: int) -> tuple[LabSource, dict[str, tuple[str, ...]]]:
    lab = read_lab(folder)
    return lab, {question: tuple(map(tr, hints)) for question, hints in lab.info.hints.items()}


def in_step(directory: CourseDirectory, step: str, student: str, lab: LabInfo) -> Path:
    """Return the student's folder of one of nbgrader's steps, such as ``submitted_directory``."""
    return Path(directory.format_path(getattr(directory, step), student, lab.directory))


def submitted_file(directory: CourseDirectory, lab: LabInfo, student: str) -> Path:
    """Return the file in which a submission is expected. A student may have sent another name."""
    return in_step(directory, "submitted_directory", student, lab) / lab.notebook


def plain_text(file: Path, limit: int) -> str:
    """Return the text of a small file of a submission; empty if it is missing, too long or not ASCII."""
    try:
        return read_regular(file, limit).decode("ascii").strip()
    except (Refused, UnicodeDecodeError):
        return ""
