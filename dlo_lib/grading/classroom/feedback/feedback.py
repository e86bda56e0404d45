"""Feedback for a class through nbgrader: the library's page replaces nbgrader's, also in formgrader.

:class:`FeedbackExporter` turns a graded notebook into the student's page. ``dlo feedback`` makes all pages
and releases them to the exchange, where ``nbgrader fetch_feedback`` finds them: their names there are a
digest of a secret that only the student's copy of the submission contains. The page is made from the graded
notebook, the gradebook, and the plots of the submission. Cost: about ten milliseconds per student, and
reading the notebook.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import Exporter
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps.api import NbGraderAPI
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import temp_attrs
from traitlets import default

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
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
    receipt_html,
)
from dlo_lib.grading.classroom.feedback.leaderboard import entry_name, read_entry
from dlo_lib.grading.classroom.feedback.other_release import release_warnings
from dlo_lib.grading.classroom.feedback.pictures import pictures_of
from dlo_lib.grading.classroom.gradebook.batch import require_release, run_step, submitted_students
from dlo_lib.grading.classroom.gradebook.deadlines import deadlines_of, seconds_late, settle
from dlo_lib.grading.classroom.gradebook.export import grades_folder
from dlo_lib.grading.classroom.gradebook.inventory import Inventory, ItemState
from dlo_lib.grading.classroom.gradebook.regrade import end_comparison, require_finished
from dlo_lib.grading.classroom.gradebook.submission_copy import TIMESTAMP
from dlo_lib.grading.classroom.publish.publication import page_in_exchange
from dlo_lib.grading.classroom.roster.course_file import FILE as COURSE_FILE
from dlo_lib.grading.classroom.roster.course_file import read_course_file
from dlo_lib.grading.classroom.roster.roster import read_roster
from dlo_lib.grading.classroom.roster.safe_files import Refused, printable, read_regular
from dlo_lib.grading.judge.cells import cell_was_missing
from dlo_lib.grading.judge.intake import MAX_BYTES, Invalid, find_submission, read_submission
from dlo_lib.grading.judge.preprocessor import SECRET_FILE
from dlo_lib.grading.judge.report import GRADED, NO_ATTEMPT, CheckReport, QuestionReport, Report
from dlo_lib.grading.judge.report_store import checks_version, report_from
from dlo_lib.grading.lab.course import LabInfo, find_lab, source_labs
from dlo_lib.grading.lab.source import TEST_PREFIX, CellKind, LabSource, read_lab, source_folder
from dlo_lib.grading.lab.times import how_late

SUBMISSION_SECRET = "submission_secret.txt"  # nbgrader derives a page's name in the exchange from it


class FeedbackExporter(Exporter):
    """nbconvert's exporter for ``GenerateFeedback``: a graded notebook becomes the student's page."""

    @default("file_extension")
    def _file_extension_default(self) -> str:
        return ".html"

    def from_filename(self, filename: str, resources: Any = None, **kw: Any) -> tuple[Any, dict[str, Any]]:
        """Return the page and nbconvert's resources."""
        names, directory = resources["nbgrader"], self.parent.coursedir  # type: ignore[union-attr]
        lab = find_lab(names["assignment"], source_labs())
        resources["output_extension"] = ".html"
        # formgrader's Release Feedback reads these files; a submission from a folder has none.
        _write_secret(directory, lab, names["student"])
        return student_page(directory, lab, names["student"], Path(filename)), resources


def make_feedback(course: NbGraderAPI, lab: LabInfo) -> dict[str, Path]:
    """Make the pages of all graded students, with the files that releasing them needs; return the pages by
    student.

    Raises:
        UserError: no submission is graded, a grading was interrupted, or a step of nbgrader failed.
    """
    require_release(course, lab)
    require_finished(grades_folder(course, lab))
    settle(course, lab)
    students = submitted_students(course, lab)
    if not any(
        _in_step(course.coursedir, "autograded_directory", student, lab).is_dir() for student in students
    ):
        raise UserError(
            tr("no submission of {lab} is graded: `dlo grade {lab}` comes first", lab=lab.directory),
        )
    run_step(course, "feedback", course.generate_feedback(lab.directory))
    pages = {
        student: _in_step(course.coursedir, "feedback_directory", student, lab) / f"{lab.name}.html"
        for student in students
    }
    made = {student: page for student, page in pages.items() if page.is_file()}
    for student, page in made.items():
        _ready_for_release(course, lab, student, page)
    return made


def note_on_inputs(course: NbGraderAPI, lab: LabInfo) -> str:
    """Return what the pages say of the inputs of checks, if students may still submit; otherwise "".

    The inputs are the same for the whole class, so a student who reads them could pass them on.
    """
    with course.gradebook as gradebook:
        due = deadlines_of(gradebook, lab.directory, course.coursedir.root).last
    if due is None:
        return tr(
            "{lab} has no due date: the pages name inputs of visible checks, which are the same for all "
            "students. If students still submit, set a due date in {file} and run this command again.",
            lab=lab.directory, file=Path(course.coursedir.root) / COURSE_FILE,
        )  # fmt: skip
    if not _is_before(due):
        return ""
    return tr(
        "The due date of {lab} has not passed for all students: the pages name no inputs of checks. Run this "
        "command again after {due:%Y-%m-%d %H:%M} UTC.",
        lab=lab.directory, due=due,
    )  # fmt: skip


def students_without_page(course: NbGraderAPI, lab: LabInfo, pages: Collection[str]) -> dict[str, list[str]]:
    """Return the students of the roster without a page, by the reason."""
    submitted = submitted_students(course, lab)
    lacking = [person.id for person in read_roster(course) if person.id not in pages]
    reasons = {
        tr("nothing submitted"): [student for student in lacking if student not in submitted],
        tr("not graded yet"): [student for student in lacking if student in submitted],
    }
    return {reason: students for reason, students in reasons.items() if students}


def release_feedback(course: NbGraderAPI, lab: LabInfo) -> None:
    """Copy the pages to the exchange; a later regrade is compared with the points on them.

    Raises:
        UserError: a step of nbgrader failed.
    """
    run_step(course, "release feedback", course.release_feedback(lab.directory))
    end_comparison(grades_folder(course, lab))


def release_receipts(course: NbGraderAPI, inventory: Inventory) -> None:
    """Release a receipt page for each submission from the exchange that has no page there yet.

    The feedback later replaces the page. An earlier collection may have failed to release a receipt.

    Raises:
        UserError: a step of nbgrader failed.
    """
    lab, staging = inventory.lab, ".receipts"
    received = inventory.of(ItemState.NEW, ItemState.REPLACED, ItemState.UNCHANGED, ItemState.KEPT)
    without_page = {item.student: item for item in received if not _has_page(course, lab, item.student)}
    if not without_page:
        return
    try:
        with temp_attrs(course.coursedir, feedback_directory=staging):
            for student, item in without_page.items():
                page = (
                    Path(course.coursedir.format_path(staging, student, lab.directory)) / f"{lab.name}.html"
                )
                card = receipt_card(course.coursedir, lab, student, item.late)
                write_text(page, receipt_html(lab.directory, card))
                _ready_for_release(course, lab, student, page)
            run_step(course, "release receipts", course.release_feedback(lab.directory))
    finally:
        shutil.rmtree(Path(course.coursedir.root) / staging, ignore_errors=True)


def _has_page(course: NbGraderAPI, lab: LabInfo, student: str) -> bool:
    """Return True if the exchange has a page about the submission, or cannot have one without a secret."""
    secret = _plain_text(_submitted(course.coursedir, lab, student).parent / SUBMISSION_SECRET, 1_000)
    return not secret or page_in_exchange(course, lab, secret).is_file()


def _in_step(directory: CourseDirectory, step: str, student: str, lab: LabInfo) -> Path:
    """Return the student's folder of one of nbgrader's steps, such as ``submitted_directory``."""
    return Path(directory.format_path(getattr(directory, step), student, lab.directory))


def _submitted(directory: CourseDirectory, lab: LabInfo, student: str) -> Path:
    return _in_step(directory, "submitted_directory", student, lab) / lab.notebook


def _ready_for_release(course: NbGraderAPI, lab: LabInfo, student: str, page: Path) -> None:
    """Write the files that nbgrader needs beside a page, and a copy of the page under the notebook's own
    name.
    """
    for other in page.parent.iterdir():
        if other != page:  # nbgrader would publish every .html file beside the notebook
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    _write_secret(course.coursedir, lab, student)
    try:
        found, _ = find_submission(_submitted(course.coursedir, lab, student), lab.directory)
    except Invalid:
        return
    if found.stem != lab.name and found.stem == printable(found.stem):  # nbgrader needs a printable name
        shutil.copyfile(page, page.with_name(f"{found.stem}.html"))


def _write_secret(directory: CourseDirectory, lab: LabInfo, student: str) -> None:
    """Write the secret and the time of the submission beside the student's page, where nbgrader reads them
    when it releases the page.
    """
    submitted = _submitted(directory, lab, student).parent
    folder = _in_step(directory, "feedback_directory", student, lab)
    secret = _plain_text(submitted / SUBMISSION_SECRET, 1_000)
    if not secret:  # not from the exchange: derive a secret that students cannot guess
        own = (Path(directory.root) / SECRET_FILE).read_bytes()
        secret = hmac.new(own, f"feedback/{student}/{lab.directory}".encode(), hashlib.sha256).hexdigest()
    write_text(folder / SUBMISSION_SECRET, secret)
    write_text(folder / TIMESTAMP, _plain_text(submitted / TIMESTAMP, 200))


def _plain_text(file: Path, limit: int) -> str:
    try:
        return read_regular(file, limit).decode("ascii").strip()
    except (Refused, UnicodeDecodeError):
        return ""


# -- the page of one student


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
    submitted = _parsed(_submitted(directory, info, student), info)
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
    notebook = _submitted(directory, lab, student)
    submitted = _plain_text(notebook.parent / TIMESTAMP, 200).removesuffix("UTC").split(".")[0].strip()
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
        early = _is_before(deadlines.last)
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


def _is_before(due: datetime | None) -> bool:
    """Return True if ``due``, a time with its zone, has not passed."""
    return due is not None and datetime.now(UTC) < due


def _lab_of(folder: Path) -> tuple[LabSource, dict[str, tuple[str, ...]]]:
    return _read(folder, max(path.stat().st_mtime_ns for path in folder.iterdir()))


@lru_cache(maxsize=4)
def _read(folder: Path, modified: int) -> tuple[LabSource, dict[str, tuple[str, ...]]]:
    lab = read_lab(folder)
    return lab, {question: tuple(map(tr, hints)) for question, hints in lab.info.hints.items()}
