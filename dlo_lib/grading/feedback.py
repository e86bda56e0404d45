"""Feedback for a class, through nbgrader: our page in the place of its own, so that its commands and formgrader's button make the same one.

:class:`FeedbackExporter` turns a graded notebook into the student's page. `dlo feedback` makes all of them and releases them to the
exchange, where `nbgrader fetch_feedback` finds them: their names there are a digest of a secret that only the student's own copy of the
submission holds. The page is made of the graded notebook, the gradebook, and the pictures of what was handed in. Cost: some ten
milliseconds a student and what reading the notebook takes.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
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

from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.grading.archive import Refused, read_regular, shown
from dlo_lib.grading.batch import released, run_step, submitted_students
from dlo_lib.grading.course import LabInfo, find_lab, source_labs
from dlo_lib.grading.feedback_page import CheckLine, Page, QuestionCard, ReceiptCard, feedback_html, receipt_html
from dlo_lib.grading.handed_in import TIMESTAMP
from dlo_lib.grading.intake import MAX_BYTES, Invalid, find_submission, read_notebook
from dlo_lib.grading.inventory import Inventory, State
from dlo_lib.grading.judge_cells import SECRET_FILE
from dlo_lib.grading.modules import load_checks
from dlo_lib.grading.pictures import Pictures, pictures_of
from dlo_lib.grading.publish import page_in_exchange
from dlo_lib.grading.receipt import digest
from dlo_lib.grading.report import GRADED, NO_ATTEMPT, QuestionReport, Report
from dlo_lib.grading.source import TEST_PREFIX, CellKind, LabSource, read_lab, source_folder
from dlo_lib.grading.stored import report_from
from dlo_lib.text import tr

SUBMISSION_SECRET = "submission_secret.txt"  # nbgrader's: what a page's name in the exchange is made of


class FeedbackExporter(Exporter):
    """nbconvert's exporter for ``GenerateFeedback``: a graded notebook becomes the student's page."""

    @default("file_extension")
    def _file_extension_default(self) -> str:
        return ".html"

    def from_filename(self, filename: str, resources: Any = None, **kw: Any) -> tuple[Any, dict[str, Any]]:
        """The page, and nbconvert's resources."""
        told, directory = resources["nbgrader"], self.parent.coursedir  # type: ignore[union-attr]
        lab = find_lab(told["assignment"], source_labs())
        resources["output_extension"] = ".html"
        return student_page(directory, lab, told["student"], Path(filename)), resources


def make_feedback(course: NbGraderAPI, lab: LabInfo) -> list[Path]:
    """Make the page of everyone who was graded, and put them where nbgrader's exchange and its students look; returns the pages.

    Raises:
        UserError: nobody was graded, or a step of nbgrader's failed.
    """
    released(course, lab)
    students = submitted_students(course, lab)
    if not any(_in_step(course.coursedir, "autograded_directory", student, lab).is_dir() for student in students):
        raise UserError(tr("nobody is graded for {lab}: `dlo grade {lab}` comes first", lab=lab.directory))
    run_step(course, "feedback", course.generate_feedback(lab.directory))
    pages = {student: _in_step(course.coursedir, "feedback_directory", student, lab) / f"{lab.name}.html" for student in students}
    made = {student: page for student, page in pages.items() if page.is_file()}
    for student, page in made.items():
        _ready_for_release(course, lab, student, page)
    return list(made.values())


def release_feedback(course: NbGraderAPI, lab: LabInfo) -> None:
    """Copy the pages to the exchange.

    Raises:
        UserError: a step of nbgrader's failed.
    """
    run_step(course, "release feedback", course.release_feedback(lab.directory))


def release_receipts(course: NbGraderAPI, inventory: Inventory) -> None:
    """Put a page that says what was received where the feedback will be, for each submission that came through the exchange and has no
    page there: what is new, and what an earlier collection failed to tell.

    Raises:
        UserError: a step of nbgrader's failed.
    """
    lab, staging = inventory.lab, ".receipts"
    received = inventory.of(State.NEW, State.REPLACED, State.UNCHANGED, State.KEPT)
    untold = {item.student: item for item in received if not _told(course, lab, item.student)}
    if not untold:
        return
    try:
        with temp_attrs(course.coursedir, feedback_directory=staging):
            for student, item in untold.items():
                page = Path(course.coursedir.format_path(staging, student, lab.directory)) / f"{lab.name}.html"
                card = receipt_card(_submitted(course.coursedir, lab, student), lab, student, item.late)
                write_text(page, receipt_html(lab.directory, card))
                _ready_for_release(course, lab, student, page)
            run_step(course, "release receipts", course.release_feedback(lab.directory))
    finally:
        shutil.rmtree(Path(course.coursedir.root) / staging, ignore_errors=True)


def _told(course: NbGraderAPI, lab: LabInfo, student: str) -> bool:
    """Whether the exchange has a page about what the student handed in; it cannot have one about what came another way."""
    secret = _plain_text(_submitted(course.coursedir, lab, student).parent / SUBMISSION_SECRET, 1_000)
    return not secret or page_in_exchange(course, lab, secret).is_file()


def _in_step(directory: CourseDirectory, step: str, student: str, lab: LabInfo) -> Path:
    """The student's folder in one of nbgrader's steps, such as ``submitted_directory``."""
    return Path(directory.format_path(getattr(directory, step), student, lab.directory))


def _submitted(directory: CourseDirectory, lab: LabInfo, student: str) -> Path:
    return _in_step(directory, "submitted_directory", student, lab) / lab.notebook


def _ready_for_release(course: NbGraderAPI, lab: LabInfo, student: str, page: Path) -> None:
    """What nbgrader needs beside a page, safe whatever was handed in; and a copy under the name the student gave the notebook."""
    notebook = _submitted(course.coursedir, lab, student)
    submitted = notebook.parent
    secret = _plain_text(submitted / SUBMISSION_SECRET, 1_000)
    if not secret:  # it did not come through the exchange: a name nobody can guess
        own = (Path(course.coursedir.root) / SECRET_FILE).read_bytes()
        secret = hmac.new(own, f"feedback/{student}/{lab.directory}".encode(), hashlib.sha256).hexdigest()
    for other in page.parent.iterdir():
        if other != page:  # nbgrader brings along what lay beside the notebook, and would publish every .html of it
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    write_text(page.parent / SUBMISSION_SECRET, secret)
    write_text(page.parent / TIMESTAMP, _plain_text(submitted / TIMESTAMP, 200))
    try:
        found, _ = find_submission(notebook, lab.directory)
    except Invalid:
        return
    if found.stem != lab.name and found.stem == shown(found.stem):  # nbgrader makes a key of the name, which not every name is fit for
        shutil.copyfile(page, page.with_name(f"{found.stem}.html"))


def _plain_text(file: Path, limit: int) -> str:
    try:
        return read_regular(file, limit).decode("ascii").strip()
    except (Refused, UnicodeDecodeError):
        return ""


# -- the page of one student


@dataclass(frozen=True)
class _Marks:
    """What the gradebook says: points and whether a person gave them, and comments, by question."""

    points: dict[str, float]
    by_hand: frozenset[str]
    comments: dict[str, str]
    penalty: float
    late_seconds: float
    maximum: float


def student_page(directory: CourseDirectory, info: LabInfo, student: str, graded: Path) -> str:
    """The feedback of ``student`` as HTML, from the graded notebook at ``graded``."""
    lab, hints = _lab_of(source_folder(info))
    dlo = nbformat.read(graded, as_version=4).metadata.get("dlo", {})
    report = report_from(dlo["report"]) if "report" in dlo else Report(info.directory, dlo.get("status", GRADED), {})
    marks = _marks(directory, info, student)
    submitted = _submitted(directory, info, student)
    cards = tuple(_card(lab, question, report.questions.get(question), marks, hints) for question in lab.questions)
    page = Page(
        student=student, lab=info.directory, title=info.title,
        total=max(0.0, sum(marks.points.values()) - marks.penalty), maximum=marks.maximum, penalty=marks.penalty,
        status=report.status, warnings=report.warnings, questions=cards,
        read=_read_next(lab, cards), pictures=_pictures(submitted, info),
    )  # fmt: skip
    return feedback_html(page, receipt_card(submitted, info, student, marks.late_seconds))


def receipt_card(notebook: Path, lab: LabInfo, student: str, late_seconds: float) -> ReceiptCard:
    """What was handed in, where ``notebook`` should be."""
    submitted = _plain_text(notebook.parent / TIMESTAMP, 200).removesuffix("UTC").split(".")[0].strip()
    late = tr("{hours:.1f} hours after the due date", hours=late_seconds / 3600) if late_seconds > 0 else ""
    try:
        found, _ = find_submission(notebook, lab.directory)
        content = read_regular(found, MAX_BYTES)
    except (Invalid, Refused) as error:
        return ReceiptCard(student, lab.notebook, 0, submitted, late, "", tr("There is no receipt: {reason}.", reason=error))
    return ReceiptCard(student, shown(found.name), len(content), submitted, late, digest(content))


def _card(lab: LabSource, question: str, report: QuestionReport | None, marks: _Marks, hints: dict[str, tuple[str, ...]]) -> QuestionCard:
    points, maximum = marks.points.get(question, 0.0), lab.test(question).points
    checks = report.checks if report is not None else ()
    lines = tuple(
        CheckLine(tr(check.title), check.points, check.maximum, check.points >= check.maximum, check.published) for check in checks
    )
    said = ""
    if report is None:
        said = tr("It was not judged.")
    elif report.status == NO_ATTEMPT:
        said, lines = tr("There is no answer of yours here yet."), ()
    if question in marks.by_hand:
        said = " ".join([said, tr("Your instructor gave these points by hand.")]).strip()
    note = report.note if report is not None else ""
    shown = hints.get(question, ()) if points < maximum else ()
    return QuestionCard(question, _heading(lab, question), points, maximum, said, lines, note, marks.comments.get(question, ""), shown)


def _heading(lab: LabSource, question: str) -> str:
    """The heading of the lab's section that the question stands in."""
    heading = question
    for cell in lab.cells:
        if cell.kind is CellKind.TEXT:
            titles = [line.lstrip("#").strip() for line in cell.source.splitlines() if line.startswith("#")]
            heading = titles[-1] if titles else heading
        if cell.kind is CellKind.SOLUTION and cell.id == question:
            break
    return heading


def _read_next(lab: LabSource, cards: Iterable[QuestionCard]) -> tuple[str, ...]:
    """Where what was lost is taught, and how the library does it."""
    lost = [card for card in cards if card.points < card.maximum]
    lines = [tr("in the lab: section “{heading}”", heading=heading) for heading in dict.fromkeys(card.heading for card in lost)]
    own = [f"`{module.replace('.', '/')}`" for module in lab.info.taught if module.startswith("dlo_lib.")]
    if lost and own:
        lines.append(tr("how the library does it: {files}", files=", ".join(own)))
    return tuple(lines)


def _pictures(submitted: Path, info: LabInfo) -> Pictures:
    try:
        return pictures_of(read_notebook(find_submission(submitted, info.directory)[0]))
    except Invalid:
        return Pictures((), 0)


def _marks(directory: CourseDirectory, info: LabInfo, student: str) -> _Marks:
    with Gradebook(directory.db_url, directory.course_id) as gradebook:
        maximum = gradebook.find_notebook(info.name, info.directory).max_score
        try:
            notebook = gradebook.find_submission_notebook(info.name, info.directory, student)
        except MissingEntry:
            return _Marks({}, frozenset(), {}, 0.0, 0.0, maximum)
        points = {grade.name.removeprefix(TEST_PREFIX): grade.score for grade in notebook.grades}
        by_hand = frozenset(grade.name.removeprefix(TEST_PREFIX) for grade in notebook.grades if grade.manual_score is not None)
        comments = {comment.name: comment.manual_comment for comment in notebook.comments if comment.manual_comment}
        late = notebook.assignment.total_seconds_late
        return _Marks(points, by_hand, comments, notebook.late_submission_penalty or 0.0, late, maximum)


def _lab_of(folder: Path) -> tuple[LabSource, dict[str, tuple[str, ...]]]:
    return _read(folder, max(path.stat().st_mtime_ns for path in folder.iterdir()))


@lru_cache(maxsize=4)
def _read(folder: Path, modified: int) -> tuple[LabSource, dict[str, tuple[str, ...]]]:
    checks = load_checks(folder)
    return read_lab(folder), {question: tuple(map(tr, hints)) for question, hints in checks.hints.items()}
