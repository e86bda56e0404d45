"""A demonstration class: three fictitious students take a lab through nbgrader's cycle, from its release to
the feedback pages.

Ada submits the reference solution, Blaise its first half, Chloé the released notebook. Release, fetch,
submit, collect, grading, feedback and export are nbgrader's steps on an exchange in the classroom's folder.
One Unix user acts for all: each student has a separate home and is named on submission. A release writes
nothing in the installed course, which may be read-only. The files of a run stay.
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

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir, write_text
from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.export import GradeTable, grades_folder
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import run_step
from dlo_lib.grading.classroom.publish.publication import publish
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.source import notebook_text, read_lab, source_folder
from dlo_lib.grading.sandbox.isolation import find_isolation

MARKER = ".classroom"  # marks a folder that may be removed
STUDENTS = {"ada": 1.0, "blaise": 0.5, "chloe": 0.0}  # name → share of the questions that are answered


@dataclass(frozen=True)
class Classroom:
    """The result of a run in ``folder``: the grades, also as CSV, and each student's feedback page."""

    folder: Path
    grades: GradeTable
    csv: Path
    feedback: dict[str, Path]


def classroom(
    lab: LabInfo, folder: str | Path | None = None, advance: Callable[[str], None] | None = None
) -> Classroom:
    """Run the whole cycle for ``lab`` in ``folder`` (default: below the state folder); an earlier run is
    removed.

    Without a sandbox on this host, the submissions are graded without one, because their code is the
    course's.

    Args:
        advance: called with the name of each finished step, :func:`number_of_steps` times.

    Raises:
        UserError: ``folder`` has other files, or a step failed; the message names the log.
    """
    done = advance or (lambda step: None)
    root = _clean(Path(folder) if folder is not None else state_dir() / "classroom" / lab.directory)
    course = open_course(create_course(root / "course", root / "exchange", STUDENTS))
    course.config.ExchangeCollect.check_owner = False  # one Unix user acts for all students

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

    unsafe = find_isolation().isolation is None  # all submissions are trusted code
    grades = grade_lab(lab, root / "course", lambda row: done(f"grade {row.student}"), Options(unsafe=unsafe))
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
    """Return the number of steps that :func:`classroom` reports."""
    return 3 + 2 * len(STUDENTS)


def _clean(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise UserError(
            f"{folder} holds something that is not a classroom: choose an empty folder with --folder"
        )
    shutil.rmtree(folder, ignore_errors=True)
    write_text(folder / MARKER, "made by `dlo classroom`, which may remove this folder\n")
    (folder / "exchange").mkdir()
    return folder


def _as_student(course: NbGraderAPI, lab: LabInfo, student: str, home: Path, step: str) -> None:
    """Run a step of a student (fetch, submit, fetch the feedback) with the student's folder and cache.

    nbgrader takes the Unix user as the student unless one is named, as ``nbgrader submit --student`` does.
    """
    home.mkdir(parents=True, exist_ok=True)
    with temp_attrs(course.coursedir, assignment_id=lab.directory, student_id=student):
        make: Callable[..., Exchange] = getattr(course.exchange, step)
        settings = {"assignment_dir": str(home), "cache": str(home / ".cache")}
        exchange = make(
            coursedir=course.coursedir, authenticator=course.authenticator, parent=course, **settings
        )
        run_step(course, f"{step} {student}", capture_log(exchange))


def _answer(lab: LabInfo, path: Path, part: float) -> None:
    """Answer the first ``part`` of the questions with the reference solution, in the notebook."""
    source = read_lab(source_folder(lab))
    questions = source.questions[: int(part * len(source.questions))]
    answered = {question: source.solution(question).answer for question in questions}
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = answered.get(cell.id, cell.source)
    write_text(path, notebook_text(notebook))
