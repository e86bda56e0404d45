"""A classroom in a box: three made-up students go through nbgrader's real cycle, from the release of a lab to their feedback pages.

Ada hands in the reference solution, Blaise only its first half, Chloé the notebook as she got it. Release, fetch, submit, collect,
grading, feedback and export are nbgrader's own steps on an exchange in the classroom's folder. One Unix user plays all parts: each student
has a home of their own, and says who they are when they submit. What a run makes stays there to look at.
``dlo classroom LAB``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbgrader.apps.api import NbGraderAPI
from nbgrader.exchange.default import Exchange
from nbgrader.utils import capture_log, temp_attrs

from dlo_lib.errors import UserError
from dlo_lib.files import state_dir, write_text
from dlo_lib.grading.batch import grade_lab, run_step
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.export import GradeTable, grades_folder
from dlo_lib.grading.nbgrader_course import create_course, open_course
from dlo_lib.grading.publish import publish
from dlo_lib.grading.source import notebook_text, read_lab, source_folder

MARKER = ".classroom"  # says that a folder is ours to remove
STUDENTS = {"ada": 1.0, "blaise": 0.5, "chloe": 0.0}  # name → the part of the questions answered


@dataclass(frozen=True)
class Classroom:
    """What a run leaves in ``folder``: the grades, also as CSV, and each student's feedback page."""

    folder: Path
    grades: GradeTable
    csv: Path
    feedback: dict[str, Path]


def classroom(lab: LabInfo, folder: str | Path | None = None, advance: Callable[[str], None] | None = None) -> Classroom:
    """Run the whole cycle for ``lab`` in ``folder`` (default: below the state folder); an earlier classroom there is removed first.

    Args:
        advance: called with the name of each step when it is done, :func:`number_of_steps` times.

    Raises:
        UserError: ``folder`` holds something else, or a step failed; the log is named.
    """
    root = _clean(Path(folder) if folder is not None else state_dir() / "classroom" / lab.directory)
    done = advance or (lambda step: None)
    course = open_course(create_course(root / "course", root / "exchange", STUDENTS))
    course.config.ExchangeCollect.check_owner = False  # one Unix user plays all parts here

    publish(course, lab)
    done("release")
    for student, part in STUDENTS.items():
        home = root / "students" / student
        _as_student(course, lab, student, home, "FetchAssignment")
        _answer(lab, home / lab.directory / lab.notebook, part)
        _as_student(course, lab, student, home, "Submit")
        done(f"{student} submits")
    run_step(course, "collect", course.collect(lab.directory))
    done("collect")

    grades = grade_lab(lab, root / "course", lambda row: done(f"grade {row.student}"))
    run_step(course, "feedback", course.generate_feedback(lab.directory))
    run_step(course, "release feedback", course.release_feedback(lab.directory))
    feedback = {}
    for student in STUDENTS:
        home = root / "students" / student
        _as_student(course, lab, student, home, "FetchFeedback")
        feedback[student] = next((home / lab.directory / "feedback").glob(f"*/{lab.name}.html"))
    done("feedback")
    return Classroom(root, grades, grades_folder(course, lab) / "results.csv", feedback)


def number_of_steps() -> int:
    """How often :func:`classroom` reports a step done."""
    return 3 + 2 * len(STUDENTS)


def _clean(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise UserError(f"{folder} holds something that is not a classroom: choose an empty folder with --folder")
    shutil.rmtree(folder, ignore_errors=True)
    write_text(folder / MARKER, "made by dlo_lib.grading.classroom, which may remove this folder\n")
    (folder / "exchange").mkdir()
    return folder


def _as_student(course: NbGraderAPI, lab: LabInfo, student: str, home: Path, step: str) -> None:
    """One of the student's own steps (fetch, submit, fetch the feedback), from the student's own folder and cache.

    nbgrader takes the Unix user for the student unless one is named, as `nbgrader submit --student` does.
    """
    home.mkdir(parents=True, exist_ok=True)
    with temp_attrs(course.coursedir, assignment_id=lab.directory, student_id=student):
        make: Callable[..., Exchange] = getattr(course.exchange, step)
        settings = {"assignment_dir": str(home), "cache": str(home / ".cache")}
        exchange = make(coursedir=course.coursedir, authenticator=course.authenticator, parent=course, **settings)
        run_step(course, f"{step} {student}", capture_log(exchange))


def _answer(lab: LabInfo, path: Path, part: float) -> None:
    """Fill the first ``part`` of the questions in with the reference solution, as the student would in the notebook."""
    source = read_lab(source_folder(lab))
    questions = source.questions[: int(part * len(source.questions))]
    answered = {question: source.solution(question).answer for question in questions}
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = answered.get(cell.id, cell.source)
    write_text(path, notebook_text(notebook))
