"""Grading a whole class: every collected submission of a lab is judged, gets its feedback page, and its row in the table.

One submission that cannot be graded costs its own row a ``GRADER_ERROR`` and nobody else's anything; why is in the course's log.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nbgrader.apps.api import NbGraderAPI
from sqlalchemy.exc import SAWarning

from dlo_lib.errors import UserError
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.export import GradeTable, read_grades, write_csv
from dlo_lib.grading.judge_cells import warm_judge
from dlo_lib.grading.modules import load_checks
from dlo_lib.grading.nbgrader_course import open_course
from dlo_lib.grading.source import read_lab, source_folder

LOG_FILE = "dlo-grade.log"
Advance = Callable[[str], None]  # called with a student's name when that student is done


def grade_lab(lab: LabInfo, folder: str | Path = ".", advance: Advance | None = None) -> GradeTable:
    """Grade the collected submissions of ``lab`` in the course of ``folder``: gradebook, feedback pages, and ``grades/<lab>.csv``.

    Raises:
        UserError: ``folder`` is no course of ours, the lab was never released there, or nothing was collected.
    """
    course = open_course(folder)
    students = submitted_students(course, lab)
    if not students:
        raise UserError(f"no submission of {lab.directory} in {course.coursedir.root}: `nbgrader collect {lab.directory}` fetches them")
    source = read_lab(source_folder(lab))
    load_checks(source.folder, source.folder)  # a mistake in them is to stop the command, not each student's grading
    with warm_judge(source):
        autograde(course, lab, students, advance)
    run_step(course, "feedback", course.generate_feedback(lab.directory))
    grades = read_grades(course, lab)
    write_csv(grades, grades_file(course, lab))
    return grades


def grade_lab_stock(lab: LabInfo, folder: str | Path = ".") -> GradeTable:
    """The grades nbgrader gives the same submissions when it runs the notebooks itself: a cross-check, in ``stock/`` of the course.

    Honest students get the same points from both. A notebook can talk this one into points: never publish its grades.

    Raises:
        UserError: ``folder`` is no course of ours.
    """
    course = open_course(folder, stock=True)
    run_step(course, "stock generate", course.generate_assignment(lab.directory))
    autograde(course, lab, submitted_students(course, lab))
    return read_grades(course, lab)


def autograde(course: NbGraderAPI, lab: LabInfo, students: Iterable[str], advance: Advance | None = None) -> None:
    """Judge the submissions of ``students`` one after another. One that fails is logged; the others go on."""
    with course.gradebook as gradebook:
        if lab.directory not in {assignment.name for assignment in gradebook.assignments}:
            raise UserError(f"{lab.directory} is not in the gradebook: run `nbgrader generate_assignment {lab.directory}` first")
    for student in students:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Object of type .* not in session", SAWarning)  # of nbgrader's own, for each new submission
            result = course.autograde(lab.directory, student)
        _log(course, f"autograde {student}", result)
        if advance is not None:
            advance(student)


def submitted_students(course: NbGraderAPI, lab: LabInfo) -> list[str]:
    """The students whose submission of ``lab`` was collected, in order."""
    return sorted(course.get_submitted_students(lab.directory))


def grades_file(course: NbGraderAPI, lab: LabInfo) -> Path:
    """Where the table of grades is written."""
    return Path(course.coursedir.root) / "grades" / f"{lab.directory}.csv"


def run_step(course: NbGraderAPI, name: str, result: dict[str, Any]) -> None:
    """Log what nbgrader said of a step that concerns the whole class.

    Raises:
        UserError: the step failed; its last line and the log are named.
    """
    log = _log(course, name, result)
    if not result["success"]:
        last = result["error"].strip().splitlines()[-1]
        raise UserError(f"nbgrader's step {name!r} failed: {last} (all of it is in {log})")


def _log(course: NbGraderAPI, name: str, result: dict[str, Any]) -> Path:
    file = Path(course.coursedir.root) / LOG_FILE
    with open(file, "a", encoding="utf-8") as log:
        log.write(f"--- {name}: {'done' if result['success'] else 'failed'}\n{result.get('log', '')}{result.get('error', '')}\n")
    return file
