"""Grades for Moodle's gradebook, as a CSV file whose columns *Grades → Import → CSV file* recognises.

The file has one line per student of the roster with the fields by which Moodle finds a user (user name,
e-mail address, ID number), the points, and a line of feedback. Import grade and feedback together, because
Moodle clears the one that is left out. A student whose grading failed or was not run has no points
here; Moodle ignores an empty grade. The same grades give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.export import GradeRow, GradeTable
from dlo_lib.grading.classroom.roster.roster_table import Person
from dlo_lib.grading.classroom.roster.tables import csv_text
from dlo_lib.grading.judge.report import GRADER_ERROR, NOT_GRADED, REFUSED
from dlo_lib.grading.lab.times import how_late


def moodle_csv(table: GradeTable, people: Mapping[str, Person]) -> str:
    """Return the table for Moodle; ``people`` by id."""
    lab = table.lab.directory
    header = ["Username", "ID number", "First name", "Last name", "Email address", lab, f"{lab} feedback"]
    rows = []
    for row in table.rows:
        person = people.get(row.student, Person(row.student))
        points = "" if has_no_points(row) else f"{row.total:g}"
        rows.append(
            [
                row.student,
                person.lms_user_id,
                person.first_name,
                person.last_name,
                person.email,
                points,
                _feedback(table, row),
            ]
        )
    return csv_text(header, rows)


def has_no_points(row: GradeRow) -> bool:
    """Return True if there are no points to publish: the grader failed or has not judged the submission, or
    the collection refused it.
    """
    return row.status.startswith((GRADER_ERROR, NOT_GRADED, REFUSED))


def _feedback(table: GradeTable, row: GradeRow) -> str:
    lost, bonus = table.lost_and_bonus(row)
    parts = [tr("{total:g} of {maximum:g} points", total=row.total, maximum=row.maximum), row.status]
    if lost and any(row.scores.values()):
        parts.append(tr("lost: {questions}", questions=lost))
    if bonus:
        parts.append(tr("bonus: {questions}", questions=bonus))
    if row.seconds_late:
        text = "late by {time}: {penalty:g} points off" if row.penalty else "late by {time}"
        parts.append(tr(text, time=how_late(row.seconds_late), penalty=row.penalty))
    return "; ".join(parts)
