"""The grades of a lab as tables: one row per student of the roster, each with a status, in a fixed order and
format.

Points come from nbgrader's gradebook, so that manual changes and late penalties count. Statuses come from the
judge, through the graded notebook and the stored reports. The same grades give the same bytes of CSV and
JSON; times are in a separate file.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import nbformat
from nbgrader.apps.api import NbGraderAPI
from rich.markup import escape
from rich.table import Table

from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.deadlines import deadlines_of, seconds_late, settle
from dlo_lib.grading.classroom.gradebook.inventory import refused_students
from dlo_lib.grading.classroom.gradebook.late_work import late_notes
from dlo_lib.grading.classroom.gradebook.manual_points import set_aside_note
from dlo_lib.grading.classroom.gradebook.regrade import Totals, pending_note, unfinished_note
from dlo_lib.grading.classroom.roster.tables import csv_text
from dlo_lib.grading.judge.report import GRADED, GRADER_ERROR, NO_ATTEMPT, NOT_GRADED, REFUSED, Report
from dlo_lib.grading.judge.report_store import StoredReport, checks_version, load, report_file
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.source import TEST_PREFIX, read_lab, source_folder
from dlo_lib.grading.lab.times import how_late

REPORTS = "reports"
RESULTS = "results"


@dataclass(frozen=True)
class GradeRow:
    """One student's grade.

    Args:
        student: the id.
        scores: points by question.
        seconds_late: seconds after the student's due date, 0 within the grace of the course file.
        penalty: points subtracted for lateness.
        total: points after the penalty.
        maximum: points of the lab.
        status: the judge's status.
        statuses: the status of each question in the report.
        warnings: what was unusual in the submission.
        checks: the version of the checks that judged it, as :func:`checks_version` returns it.
    """

    student: str
    scores: dict[str, float]
    penalty: float
    total: float
    maximum: float
    status: str
    statuses: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    checks: str = ""
    seconds_late: int = 0


@dataclass(frozen=True)
class GradeTable:
    """The grades of a lab, sorted by student; ``questions`` in the lab's order, with their maximal points;
    ``notes`` on what the instructor should look at; ``stopped``: why the batch ended before all were graded;
    ``judged``: the students whose submissions this run has judged.
    """

    lab: LabInfo
    questions: dict[str, float]
    rows: tuple[GradeRow, ...]
    notes: tuple[str, ...] = ()
    stopped: str = ""
    judged: tuple[str, ...] = ()

    def csv(self) -> str:
        """Return the table as CSV; the same grades give the same text."""
        header = ["student", "lab", *self.questions, "seconds_late", "penalty", "total", "max", "status"]
        rows = []
        for row in self.rows:
            points = [row.scores[question] for question in self.questions]
            values = (*points, row.penalty, row.total, row.maximum)
            numbers = [f"{value:g}" for value in values]
            numbers.insert(len(points), str(row.seconds_late))
            rows.append([row.student, self.lab.directory, *numbers, row.status])
        return csv_text(header, rows)

    def json(self) -> str:
        """Return the table as JSON, with the status of each question; the same grades give the same text."""
        rows = []
        for row in self.rows:
            questions = {
                name: {"points": row.scores[name], "max": most, "status": row.statuses.get(name, row.status)}
                for name, most in self.questions.items()
            }
            grade = {
                "seconds_late": row.seconds_late,
                "penalty": row.penalty,
                "total": row.total,
                "max": row.maximum,
                "status": row.status,
                "checks": row.checks,
            }
            rows.append(
                {"student": row.student, **grade, "questions": questions, "warnings": list(row.warnings)}
            )
        return json.dumps({"lab": self.lab.directory, "rows": rows}, indent=1) + "\n"

    def shown(self) -> Table:
        """Return the table for a terminal: totals, and the questions that lost points."""
        table = Table(
            "student",
            "total",
            "max",
            "status",
            "points lost",  # and points above the maximum
            title=f"{self.lab.directory}: {self.lab.title}",
        )
        table.columns[1].justify = table.columns[2].justify = "right"
        for row in self.rows:
            table.add_row(
                escape(row.student), f"{row.total:g}", f"{row.maximum:g}", escape(row.status), self._lost(row)
            )
        return table

    def _lost(self, row: GradeRow) -> str:
        if not any(row.scores.values()):
            return "all"
        lost, bonus = self.lost_and_bonus(row)
        late = [f"{how_late(row.seconds_late)} late -{row.penalty:g}"] if row.seconds_late else []
        more = [tr("bonus: {questions}", questions=bonus)] if bonus else []
        return ", ".join([*([lost] if lost else []), *late, *more])

    def lost_and_bonus(self, row: GradeRow) -> tuple[str, str]:
        """Return the questions that lost points, and those with points above their maximum, as text."""
        above = {question: row.scores[question] - most for question, most in self.questions.items()}
        lost = ", ".join(f"{question} {-points:g}" for question, points in above.items() if points < 0)
        bonus = ", ".join(f"{question} +{points:g}" for question, points in above.items() if points > 0)
        return lost, bonus


def grades_folder(course: NbGraderAPI, lab: LabInfo) -> Path:
    """Return ``grades/<lab>/`` of a course, the folder that grading writes."""
    return Path(course.coursedir.root) / "grades" / lab.directory


def stored_report(course: NbGraderAPI, lab: LabInfo, student: str) -> Report | None:
    """Return the judge's report of ``student``'s submission in the last grading; None if there is none."""
    stored = _stored(course, lab, student)
    return stored.report if stored is not None else None


def results_before(course: NbGraderAPI, lab: LabInfo) -> Totals:
    """Return the total and the version of the checks of each student in ``results.json``, if there is one.

    The total is the one of the gradebook: points may have been given by hand since the file was written.
    """
    try:
        text = (grades_folder(course, lab) / f"{RESULTS}.json").read_text(encoding="utf-8")
        found = {row["student"]: (row["total"], row.get("checks", "")) for row in json.loads(text)["rows"]}
    except (OSError, ValueError, KeyError):
        return {}
    with course.gradebook as gradebook:
        for notebook in gradebook.notebook_submissions(lab.name, lab.directory):
            if notebook.student.id in found:
                total = max(0.0, notebook.score - (notebook.late_submission_penalty or 0.0))
                found[notebook.student.id] = (total, found[notebook.student.id][1])
    return found


def changed_checks(before: Totals, table: GradeTable) -> list[str]:
    """Return notes on the students whose total changed since ``before``, when their checks changed too."""
    notes = []
    for row in table.rows:
        total, checks = before.get(row.student, (row.total, ""))
        if checks and row.checks and checks != row.checks and total != row.total:
            text = (
                "{student}: {before:g} points before, {total:g} now; the checks have changed ({old} → {new})"
            )
            notes.append(
                tr(text, student=row.student, before=total, total=row.total, old=checks, new=row.checks)
            )
    return notes


def write_results(course: NbGraderAPI, table: GradeTable) -> Path:
    """Write ``results.csv`` and ``results.json``; return their folder."""
    folder = grades_folder(course, table.lab)
    write_text(folder / f"{RESULTS}.csv", table.csv())
    write_text(folder / f"{RESULTS}.json", table.json())
    return folder


def settled_grades(course: NbGraderAPI, lab: LabInfo) -> GradeTable:
    """Return the grades of ``lab`` with the due dates, extensions and penalties of the course file as it is
    now.

    Raises:
        UserError: as :func:`dlo_lib.grading.classroom.gradebook.deadlines.settle`.
    """
    settle(course, lab)
    table = read_grades(course, lab)
    note = unfinished_note(grades_folder(course, lab))
    return replace(table, notes=(note, *table.notes)) if note else table


def read_grades(course: NbGraderAPI, lab: LabInfo) -> GradeTable:
    """Return the grades of ``lab`` in the gradebook, a row for every student of the roster."""
    notes, late_aside = [], []
    refused = refused_students(grades_folder(course, lab))
    with course.gradebook as gradebook:
        deadlines = deadlines_of(gradebook, lab.directory, course.coursedir.root)
        notebook = gradebook.find_notebook(lab.name, lab.directory)
        maxima = {cell.name.removeprefix(TEST_PREFIX): cell.max_score for cell in notebook.grade_cells}
        questions = {
            question: maxima[question]
            for question in read_lab(source_folder(lab)).questions
            if question in maxima
        }
        rows = []
        for student in sorted(student.id for student in gradebook.students):
            scores, penalty, late = dict.fromkeys(questions, 0.0), 0.0, 0
            graded, status, checks = _status(course, lab, student, refused)
            if graded:  # otherwise the gradebook has the points of an earlier grading
                submitted = gradebook.find_submission_notebook(lab.name, lab.directory, student)
                scores |= {grade.name.removeprefix(TEST_PREFIX): grade.score for grade in submitted.grades}
                penalty = submitted.late_submission_penalty or 0.0
                late = round(seconds_late(submitted.assignment, deadlines))
                if note := set_aside_note(grades_folder(course, lab), submitted, student):
                    notes.append(f"{student}: {note}")
            place = course.coursedir.format_path(course.coursedir.submitted_directory, student, lab.directory)
            late_aside += late_notes(Path(course.coursedir.root), Path(place), lab, student, deadlines)
            total = max(0.0, sum(scores.values()) - penalty)
            report = stored_report(course, lab, student) if graded else None
            statuses = (
                {name: question.status for name, question in report.questions.items()}
                if report is not None
                else {}
            )
            warnings = report.warnings if report is not None else ()
            rows.append(
                GradeRow(
                    student,
                    scores,
                    penalty,
                    total,
                    notebook.max_score,
                    status,
                    statuses,
                    warnings,
                    checks,
                    late,
                )
            )
    if notes:
        text = (
            "`dlo grade {lab} --keep-manual` gives them to the new submission; with --only, to one student's"
        )
        notes.append(tr(text, lab=lab.directory))
    notes += late_aside
    now = checks_version(source_folder(lab))
    earlier = [row.student for row in rows if row.checks not in ("", now)]
    if earlier:
        text = "graded with an earlier version of the checks: {students}; `dlo grade {lab}` judges them again"
        notes.append(tr(text, students=", ".join(earlier), lab=lab.directory))
    if note := pending_note(grades_folder(course, lab)):
        notes.append(note)
    return GradeTable(lab, questions, tuple(rows), tuple(notes))


def _status(
    course: NbGraderAPI, lab: LabInfo, student: str, refused: Collection[str]
) -> tuple[bool, str, str]:
    """Return whether there is a graded notebook, the judge's status of the submission, and the version of the
    checks.
    """
    directory = course.coursedir
    graded = (
        Path(directory.format_path(directory.autograded_directory, student, lab.directory)) / lab.notebook
    )
    if graded.is_file():
        stored = nbformat.read(graded, as_version=4).metadata.get("dlo", {})
        return True, str(stored.get("status", GRADED)), str(stored.get("checks", ""))
    submitted = Path(directory.format_path(directory.submitted_directory, student, lab.directory))
    if not submitted.is_dir():
        return False, REFUSED if student in refused else NO_ATTEMPT, ""
    return False, NOT_GRADED if _stored(course, lab, student) is None else GRADER_ERROR, ""


def _stored(course: NbGraderAPI, lab: LabInfo, student: str) -> StoredReport | None:
    return load(report_file(grades_folder(course, lab) / REPORTS, student))
