"""The steps of nbgrader's own programs in a course: what they need, and the log of what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbgrader.apps.api import NbGraderAPI

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.export import GradeTable, read_grades
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.judge.client import LOG_FILE
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.source import TEST_PREFIX, CellKind, LabSource


def require_release(course: NbGraderAPI, lab: LabInfo) -> None:
    """Check that the lab is released in the course.

    Raises:
        UserError: the gradebook does not contain the lab.
    """
    with course.gradebook as gradebook:
        if lab.directory not in {assignment.name for assignment in gradebook.assignments}:
            raise UserError(
                f"{lab.directory} is not in the gradebook: `dlo release {lab.directory}` comes first"
            )


def submitted_students(course: NbGraderAPI, lab: LabInfo) -> list[str]:
    """Return the students whose submission of ``lab`` is collected, sorted."""
    return sorted(course.get_submitted_students(lab.directory))


def check_cells(course: NbGraderAPI, lab: LabSource) -> None:
    """Check that the gradebook has the current questions and points of ``lab``.

    Raises:
        UserError: they differ.
    """
    with course.gradebook as gradebook:
        notebook = gradebook.find_notebook(lab.info.name, lab.info.directory)
        known = {cell.name: cell.max_score for cell in notebook.grade_cells}
    asked = {cell.id: cell.points for cell in lab.cells if cell.kind is CellKind.TEST}
    if changed := sorted(name.removeprefix(TEST_PREFIX) for name, _ in known.items() ^ asked.items()):
        text = (
            "{lab} was changed after its release ({questions}): generate it again; "
            "nbgrader accepts new questions only before the first submission"
        )
        raise UserError(tr(text, lab=lab.info.directory, questions=", ".join(dict.fromkeys(changed))))


def run_step(course: NbGraderAPI, name: str, result: dict[str, Any]) -> None:
    """Log nbgrader's output of a step for the whole class.

    Raises:
        UserError: the step failed; the message has its last line and names the log.
    """
    log = log_step(course, name, result)
    if not result["success"]:
        last = result["error"].strip().splitlines()[-1]
        raise UserError(f"nbgrader's step {name!r} failed: {last} (all of it is in {log})")


def log_step(course: NbGraderAPI, name: str, result: dict[str, Any]) -> Path:
    """Append nbgrader's output of a step to the course's log; return the log."""
    file = Path(course.coursedir.root) / LOG_FILE
    with open(file, "a", encoding="utf-8", errors="replace") as log:
        log.write(
            f"--- {name}: {'done' if result['success'] else 'failed'}\n"
            f"{result.get('log', '')}{result.get('error', '')}\n"
        )
    return file


def grade_lab_stock(lab: LabInfo, folder: str | Path = ".") -> GradeTable:
    """Grade the same submissions with nbgrader's execution, in ``stock/`` of the course, as a cross-check.

    Honest submissions get the same points from both. Never publish these grades: a notebook can forge them.

    Raises:
        UserError: ``folder`` is no course of this library.
    """
    course = open_course(folder, stock=True)
    run_step(course, "stock generate", course.generate_assignment(lab.directory))
    require_release(course, lab)
    for student in submitted_students(course, lab):
        log_step(course, f"autograde {student}", course.autograde(lab.directory, student))
    return read_grades(course, lab)
