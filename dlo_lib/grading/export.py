"""The grades of a lab as a table: one row a student of the roster, each with a status, in an order and a format that never change.

Points come from nbgrader's gradebook, so that an instructor's manual changes and late penalties count; the status comes from the judge and
travels in the graded notebook. The CSV of the same grades is the same bytes.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbgrader.apps.api import NbGraderAPI
from rich.table import Table

from dlo_lib.files import write_text
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.report import GRADED, GRADER_ERROR, NO_ATTEMPT
from dlo_lib.grading.source import TEST_PREFIX, read_lab, source_folder


@dataclass(frozen=True)
class GradeRow:
    """One student's grade: ``scores`` by question; ``total`` is after the penalty for lateness; both in points."""

    student: str
    scores: dict[str, float]
    penalty: float
    total: float
    maximum: float
    status: str


@dataclass(frozen=True)
class GradeTable:
    """The grades of a lab, in the order of the students' names; ``questions`` in the lab's order, with the points each can give."""

    lab: LabInfo
    questions: dict[str, float]
    rows: tuple[GradeRow, ...]

    def csv(self) -> str:
        """The table as CSV; the same grades give the same text."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["student", "lab", *self.questions, "penalty", "total", "max", "status"])
        for row in self.rows:
            points = [row.scores[question] for question in self.questions]
            numbers = [f"{value:g}" for value in (*points, row.penalty, row.total, row.maximum)]
            writer.writerow([row.student, self.lab.directory, *numbers, row.status])
        return text.getvalue()

    def shown(self) -> Table:
        """The table for a terminal: totals, and where points were lost."""
        table = Table("student", "total", "max", "status", "points lost", title=f"{self.lab.directory}: {self.lab.title}")
        table.columns[1].justify = table.columns[2].justify = "right"
        for row in self.rows:
            table.add_row(row.student, f"{row.total:g}", f"{row.maximum:g}", row.status, self._lost(row))
        return table

    def _lost(self, row: GradeRow) -> str:
        lost = {question: maximum - row.scores[question] for question, maximum in self.questions.items()}
        if not any(row.scores.values()):
            return "all"
        late = [f"late {row.penalty:g}"] if row.penalty else []
        return ", ".join([f"{question} {points:g}" for question, points in lost.items() if points] + late)


def read_grades(course: NbGraderAPI, lab: LabInfo) -> GradeTable:
    """The grades of ``lab`` as they stand in the course, a row for every student of its roster."""
    with course.gradebook as gradebook:
        notebook = gradebook.find_notebook(lab.name, lab.directory)
        maxima = {cell.name.removeprefix(TEST_PREFIX): cell.max_score for cell in notebook.grade_cells}
        questions = {question: maxima[question] for question in read_lab(source_folder(lab)).questions if question in maxima}
        rows = []
        for student in sorted(student.id for student in gradebook.students):
            scores, penalty = dict.fromkeys(questions, 0.0), 0.0
            graded, status = _status(course, lab, student)
            if graded:  # else the points that may stand in the gradebook are of an earlier grading
                submitted = gradebook.find_submission_notebook(lab.name, lab.directory, student)
                scores |= {grade.name.removeprefix(TEST_PREFIX): grade.score for grade in submitted.grades}
                penalty = submitted.late_submission_penalty or 0.0
            total = max(0.0, sum(scores.values()) - penalty)
            rows.append(GradeRow(student, scores, penalty, total, notebook.max_score, status))
    return GradeTable(lab, questions, tuple(rows))


def _status(course: NbGraderAPI, lab: LabInfo, student: str) -> tuple[bool, str]:
    """Whether there is a graded notebook, and the judge's status word for the submission."""
    directory = course.coursedir
    graded = Path(directory.format_path(directory.autograded_directory, student, lab.directory)) / lab.notebook
    if graded.is_file():
        return True, str(nbformat.read(graded, as_version=4).metadata.get("dlo", {}).get("status", GRADED))
    submitted = Path(directory.format_path(directory.submitted_directory, student, lab.directory))
    return False, GRADER_ERROR if submitted.is_dir() else NO_ATTEMPT


def write_csv(table: GradeTable, path: Path) -> Path:
    """Write the table as CSV."""
    write_text(path, table.csv())
    return path
