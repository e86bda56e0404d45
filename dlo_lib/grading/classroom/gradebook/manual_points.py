"""Points and comments that a grader gave by hand belong to the submission that the grader read.

nbgrader keeps them when the student submits again, so the points of the first submission would count for the
second. Here they are set aside when the submission has changed: its row is marked for another review, and the
earlier points are kept in ``grades/<lab>/manual/``, one file per student. ``dlo grade --keep-manual`` gives
them to the new submission. They stay when the same submission is judged again, also after a changed check.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbgrader.api import Gradebook, SubmittedNotebook
from nbgrader.preprocessors import SaveAutoGrades
from traitlets import Bool

from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.judge.report_store import report_file, submission_key
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.source import TEST_PREFIX

FOLDER = "manual"


@dataclass(frozen=True)
class ByHand:
    """What a grader entered for one cell.

    Args:
        cell: the id of the test cell, or of the solution cell for a comment.
        points: the points that replace the judge's; None if the judge's count.
        extra: points added to them.
        comment: the comment, in Markdown.
    """

    cell: str
    points: float | None = None
    extra: float | None = None
    comment: str | None = None

    @property
    def text(self) -> str:
        """The entry in words, such as ``exchange 3.5``."""
        parts = [
            *([f"{self.points:g}"] if self.points is not None else []),
            *([f"+{self.extra:g}"] if self.extra else []),
            *([tr("a comment")] if self.comment else []),
        ]
        return f"{self.cell.removeprefix(TEST_PREFIX)} {' '.join(parts)}"


@dataclass(frozen=True)
class SetAside:
    """Entries for an earlier submission, which was made at ``submitted``."""

    submitted: str
    entries: tuple[ByHand, ...]


@dataclass(frozen=True)
class RowHistory:
    """What is known about one student's row: the digest and the time of the submission in the gradebook, and
    what was set aside, the newest last.
    """

    submission: str = ""
    submitted: str = ""
    aside: tuple[SetAside, ...] = ()

    def save(self, file: Path) -> None:
        """Write the record atomically."""
        write_text(file, json.dumps(asdict(self), indent=1))


def load_record(grades: Path, student: str) -> RowHistory:
    """Return the record of ``student`` in the folder ``grades`` of a lab; an empty one if there is none.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        values = json.loads(_file(grades, student).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return RowHistory()
    aside = (
        SetAside(one["submitted"], tuple(ByHand(**entry) for entry in one["entries"]))
        for one in values["aside"]
    )
    return RowHistory(values["submission"], values["submitted"], tuple(aside))


def set_aside_note(grades: Path, notebook: SubmittedNotebook, student: str) -> str:
    """Return a sentence about points of an earlier submission that no grader has reviewed since, or an empty
    text.
    """
    record = load_record(grades, student)
    if not record.aside:
        return ""
    last = record.aside[-1]
    graded = {grade.name: grade for grade in notebook.grades}
    cells = [entry.cell for entry in last.entries if entry.cell in graded]
    unreviewed = (graded[cell].needs_manual_grade and graded[cell].manual_score is None for cell in cells)
    if cells and not any(unreviewed):
        return ""  # a grader has looked at the new submission
    if not cells and any(comment.manual_comment for comment in notebook.comments):
        return ""
    return tr(
        "set aside, because they were given by hand for the submission of {time}: {entries}",
        time=last.submitted or tr("an unknown time"),
        entries=", ".join(entry.text for entry in last.entries),
    )


class SaveScores(SaveAutoGrades):
    """nbgrader's step that saves the judge's scores. It sets points aside that a grader gave for another
    submission.
    """

    keep_manual = Bool(False, help="Points and comments given by hand also count for a new submission.").tag(
        config=True
    )

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Save the score and the comment of each cell."""
        names, course = resources["nbgrader"], self.parent.parent.coursedir
        self.name_row(names)
        submitted = Path(
            course.format_path(course.submitted_directory, names["student"], names["assignment"])
        )
        lab = find_lab(names["assignment"], source_labs())
        with Gradebook(names["db_url"]) as self.gradebook:
            rows = self.gradebook.find_submission_notebook(
                names["notebook"], names["assignment"], names["student"]
            )
            grades = Path(course.root) / "grades" / names["assignment"]
            self.save(nb, resources, rows, grades, submitted_now(submitted / lab.notebook, rows))
            self.gradebook.db.commit()
        return nb, resources

    def save(
        self, nb: NotebookNode, resources: Any, rows: SubmittedNotebook, grades: Path, submission: RowHistory
    ) -> None:
        """Save the scores of ``nb`` in ``rows``; ``submission`` identifies what was judged."""
        student = resources["nbgrader"]["student"]
        before = load_record(grades, student)
        unreviewed = {grade.name for grade in rows.grades if grade.needs_manual_grade}
        for index, cell in enumerate(nb.cells):
            nb.cells[index], resources = self.preprocess_cell(cell, resources, index)
        record = replace(submission, aside=before.aside)
        if self.keep_manual:
            if before.aside and _restore(rows, before.aside[-1].entries):
                record = replace(record, aside=before.aside[:-1])
        elif before.submission not in ("", submission.submission) and (given := tuple(_by_hand(rows))):
            record = replace(record, aside=(*before.aside, SetAside(before.submitted, given)))
            _clear(rows, given)
        else:
            _keep_unreviewed(rows, record, unreviewed)
        record.save(_file(grades, student))

    def name_row(self, names: Any) -> None:
        """Set the names under which nbgrader's step finds the rows of a submission."""
        self.notebook_id, self.assignment_id, self.student_id = (
            names["notebook"],
            names["assignment"],
            names["student"],
        )


def submitted_now(notebook: Path, rows: SubmittedNotebook) -> RowHistory:
    """Return a record of the submission that is expected at ``notebook`` and entered in ``rows``."""
    time = rows.assignment.timestamp
    return RowHistory(submission_key("", notebook), "" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC")


def _by_hand(rows: SubmittedNotebook) -> Iterable[ByHand]:
    for grade in rows.grades:
        if grade.manual_score is not None or grade.extra_credit:
            yield ByHand(grade.name, grade.manual_score, grade.extra_credit)
    for comment in rows.comments:
        if comment.manual_comment:
            yield ByHand(comment.name, comment=comment.manual_comment)


def _restore(rows: SubmittedNotebook, entries: Iterable[ByHand]) -> bool:
    """Enter ``entries`` where a grader has entered nothing since; return whether there was such a cell."""
    grades = {grade.name: grade for grade in rows.grades}
    comments = {comment.name: comment for comment in rows.comments}
    restored = False
    for entry in entries:
        grade, comment = grades.get(entry.cell), comments.get(entry.cell)
        if grade is not None and grade.manual_score is None and not grade.extra_credit:
            grade.manual_score, grade.extra_credit = entry.points, entry.extra
            grade.needs_manual_grade, restored = True, True
        if comment is not None and entry.comment and not comment.manual_comment:
            comment.manual_comment, restored = entry.comment, True
    return restored


def _keep_unreviewed(rows: SubmittedNotebook, record: RowHistory, unreviewed: set[str]) -> None:
    """Keep the mark for a review of cells whose points were set aside; nbgrader's step has removed it."""
    cells = {entry.cell for one in record.aside[-1:] for entry in one.entries}
    for grade in rows.grades:
        if grade.name in cells & unreviewed:
            grade.needs_manual_grade = True


def _clear(rows: SubmittedNotebook, given: Iterable[ByHand]) -> None:
    cells = {entry.cell for entry in given}
    for grade in rows.grades:
        if grade.name in cells:
            grade.manual_score = grade.extra_credit = None
            grade.needs_manual_grade = True
    for comment in rows.comments:
        if comment.name in cells:
            comment.manual_comment = None


def _file(grades: Path, student: str) -> Path:
    return report_file(grades / FOLDER, student)
