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
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nbconvert.exporters import Exporter
from nbgrader.apps.api import NbGraderAPI
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import temp_attrs
from traitlets import default

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.feedback.feedback_page import receipt_html
from dlo_lib.grading.classroom.feedback.student_page import (
    in_step,
    is_before,
    plain_text,
    receipt_card,
    student_page,
    submitted_file,
)
from dlo_lib.grading.classroom.gradebook.deadlines import deadlines_of, settle
from dlo_lib.grading.classroom.gradebook.export import grades_folder
from dlo_lib.grading.classroom.gradebook.inventory import Inventory, ItemState
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import require_release, run_step, submitted_students
from dlo_lib.grading.classroom.gradebook.regrade import end_comparison, require_finished
from dlo_lib.grading.classroom.gradebook.submission_copy import TIMESTAMP
from dlo_lib.grading.classroom.publish.publication import page_in_exchange
from dlo_lib.grading.classroom.roster.course_file import FILE as COURSE_FILE
from dlo_lib.grading.classroom.roster.roster import read_roster
from dlo_lib.grading.classroom.roster.safe_files import printable
from dlo_lib.grading.judge.intake import Invalid, find_submission
from dlo_lib.grading.judge.preprocessor import SECRET_FILE
from dlo_lib.grading.lab.course import LabInfo, find_lab, source_labs

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
        in_step(course.coursedir, "autograded_directory", student, lab).is_dir() for student in students
    ):
        raise UserError(
            tr("no submission of {lab} is graded: `dlo grade {lab}` comes first", lab=lab.directory),
        )
    run_step(course, "feedback", course.generate_feedback(lab.directory))
    pages = {
        student: in_step(course.coursedir, "feedback_directory", student, lab) / f"{lab.name}.html"
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
    if not is_before(due):
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
    secret = plain_text(submitted_file(course.coursedir, lab, student).parent / SUBMISSION_SECRET, 1_000)
    return not secret or page_in_exchange(course, lab, secret).is_file()


def _ready_for_release(course: NbGraderAPI, lab: LabInfo, student: str, page: Path) -> None:
    """Write the files that nbgrader needs beside a page, and a copy of the page under the notebook's own
    name.
    """
    for other in page.parent.iterdir():
        if other != page:  # nbgrader would publish every .html file beside the notebook
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    _write_secret(course.coursedir, lab, student)
    try:
        found, _ = find_submission(submitted_file(course.coursedir, lab, student), lab.directory)
    except Invalid:
        return
    if found.stem != lab.name and found.stem == printable(found.stem):  # nbgrader needs a printable name
        shutil.copyfile(page, page.with_name(f"{found.stem}.html"))


def _write_secret(directory: CourseDirectory, lab: LabInfo, student: str) -> None:
    """Write the secret and the time of the submission beside the student's page, where nbgrader reads them
    when it releases the page.
    """
    submitted = submitted_file(directory, lab, student).parent
    folder = in_step(directory, "feedback_directory", student, lab)
    secret = plain_text(submitted / SUBMISSION_SECRET, 1_000)
    if not secret:  # not from the exchange: derive a secret that students cannot guess
        own = (Path(directory.root) / SECRET_FILE).read_bytes()
        secret = hmac.new(own, f"feedback/{student}/{lab.directory}".encode(), hashlib.sha256).hexdigest()
    write_text(folder / SUBMISSION_SECRET, secret)
    write_text(folder / TIMESTAMP, plain_text(submitted / TIMESTAMP, 200))
