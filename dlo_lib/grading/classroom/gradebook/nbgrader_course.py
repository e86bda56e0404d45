"""Create and open an nbgrader course whose grades come from the judge.

A course is a folder with an ``nbgrader_config.py`` of one call, :func:`configure`. Its source is the
checkout's ``solutions/``; it has a separate gradebook, releases, submissions and feedback. In it ``nbgrader
autograde``, formgrader's buttons and ``dlo grade`` all judge submissions in other processes. Its folder
``stock/`` has a second configuration, :func:`configure_stock`, in which nbgrader executes the notebooks
itself, as a cross-check: it has a separate gradebook and trusts the student's kernel. ``dlo course FOLDER``
creates a course.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from pathlib import Path
from textwrap import dedent

import nbgrader
from nbgrader.api import Base, Gradebook
from nbgrader.apps.api import NbGraderAPI
from nbgrader.converters import Autograde
from nbgrader.preprocessors import AssignLatePenalties, Execute, SaveAutoGrades, SaveCells
from sqlalchemy import create_engine
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from dlo_lib.base.files import write_text
from dlo_lib.grading.classroom.gradebook.deadlines import CoursePenalties
from dlo_lib.grading.classroom.gradebook.gradebook_file import require_gradebook
from dlo_lib.grading.classroom.gradebook.manual_points import SaveScores
from dlo_lib.grading.classroom.roster.course_access import (
    SHARED_UMASK,
    create_folder,
    enter_course,
    is_shared,
)
from dlo_lib.grading.classroom.roster.roster import listed_name
from dlo_lib.grading.classroom.roster.roster_table import Person
from dlo_lib.grading.judge.client import no_course
from dlo_lib.grading.judge.preprocessor import SECRET_FILE, ExecuteWithHidden, JudgeCells, SubmissionExporter
from dlo_lib.grading.lab.course import QUIZ_ANSWERS_FILE, course_root, source_labs
from dlo_lib.grading.lab.release import LEFT_BY_TOOLS, NEVER, RELEASE_STEPS, RefuseLeaks

COURSE_ID = "dlo"
CONFIG_FILE = "nbgrader_config.py"
STOCK_FOLDER = "stock"
SOURCE_FOLDER = "source"  # nbgrader makes the releases of it; ``publication`` writes it
STOCK_CELL_SECONDS = 300  # nbgrader's 30 s is too short for a cell that trains


def configure(
    c: Config, folder: str | Path, exchange: str | Path | None = None, course: str = COURSE_ID
) -> None:
    """Set up ``c`` for the course in ``folder``: grading asks the judge.

    Args:
        exchange: the folder that students fetch from and submit to; by default nbgrader's.
        course: nbgrader's course id, the folder of this course in the exchange.
    """
    folder = Path(folder).resolve()
    _configure_release(c, folder, course)
    if is_shared(folder):
        c.CourseDirectory.groupshared = True
        os.umask(SHARED_UMASK)  # formgrader and nbgrader's commands load this configuration too
    if exchange is not None:
        c.Exchange.root = str(exchange)
    c.Autograde.exporter_class = (
        SubmissionExporter  # reads any file and rebuilds the notebook from the release
    )
    c.Autograde.sanitize_preprocessors = []
    ours = {Execute: JudgeCells, SaveAutoGrades: SaveScores, AssignLatePenalties: CoursePenalties}
    c.Autograde.autograde_preprocessors = [
        ours.get(step, step) for step in Autograde().autograde_preprocessors
    ]
    # By name, so that the module is imported only when feedback is made.
    c.GenerateFeedback.exporter_class = "dlo_lib.grading.classroom.feedback.feedback.FeedbackExporter"
    c.GenerateFeedback.preprocessors = []


def configure_stock(c: Config, folder: str | Path) -> None:
    """Set up ``c`` for ``folder``, the ``stock/`` of a course: nbgrader executes the course's submissions
    itself.
    """
    _configure_release(c, Path(folder).resolve(), COURSE_ID)
    c.Autograde.autograde_preprocessors = [
        ExecuteWithHidden if step is Execute else step for step in Autograde().autograde_preprocessors
    ]
    c.Execute.timeout = STOCK_CELL_SECONDS


def _configure_release(c: Config, folder: Path, course: str) -> None:
    c.CourseDirectory.root = str(folder)
    c.CourseDirectory.course_id = course
    c.CourseDirectory.source_directory = SOURCE_FOLDER
    c.CourseDirectory.release_directory = "release"
    # .html: otherwise nbgrader publishes a student's page, or a link to a file of the instructor, as
    # feedback.
    # The answers of the quiz are for a person without a class; a class gets them by the feedback.
    never = (*NEVER, QUIZ_ANSWERS_FILE)
    c.CourseDirectory.ignore = [*LEFT_BY_TOOLS, "*.pyc", "feedback", *never, "*.html"]
    c.GenerateAssignment.preprocessors = [*RELEASE_STEPS, SaveCells, RefuseLeaks]


def create_course(
    folder: str | Path,
    exchange: str | Path | None = None,
    students: Collection[str] = (),
    group: str | None = None,
    course: str = COURSE_ID,
) -> Path:
    """Create a course in ``folder``, or update an existing one: its configurations, its secret and its
    roster.

    Only the grader, or the members of ``group``, can enter the folder. Grades, submissions, the secret, and a
    configuration that the instructor has changed stay.

    Raises:
        UserError: there is no such group, or this user cannot give the folder to it.
    """
    folder = Path(folder).resolve()
    create_folder(folder, group)
    (folder / STOCK_FOLDER).mkdir(parents=True, exist_ok=True)
    _link(folder / "solutions", course_root() / "solutions")
    # A separate course instead of options, because nbgrader reads the configuration in the course's root
    # last.
    for lab in source_labs():  # formgrader shows the labs that have a folder there
        (folder / SOURCE_FOLDER / lab.directory).mkdir(parents=True, exist_ok=True)
    for shared in (SOURCE_FOLDER, "submitted"):
        _link(folder / STOCK_FOLDER / shared, Path("..") / shared)
    if not (folder / SECRET_FILE).exists():
        # The inputs of the checks are drawn from the secret, so they are the same in each grading of the
        # class.
        with open(
            os.open(folder / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660), "w", encoding="ascii"
        ) as file:
            file.write(secrets.token_hex(32) + "\n")
    given = "" if exchange is None else f", exchange={str(exchange)!r}"
    given += "" if course == COURSE_ID else f", course={course!r}"
    _write_config(folder / CONFIG_FILE, "configure", f"c, Path(__file__).parent{given}")
    _write_config(folder / STOCK_FOLDER / CONFIG_FILE, "configure_stock", "c, Path(__file__).parent")
    _enrol(folder / "gradebook.db", folder / STOCK_FOLDER / "gradebook.db", students)
    return folder


def _link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()  # the checkout may have moved
    if not link.exists():
        link.symlink_to(target)


def _enrol(gradebook_file: Path, stock_file: Path, students: Collection[str]) -> None:
    for file in (gradebook_file, stock_file):
        if not file.exists():
            _create_gradebook(file)
        with Gradebook(f"sqlite:///{file}", COURSE_ID) as gradebook:
            known = {student.id for student in gradebook.students}
            for student in set(students) - known:
                gradebook.update_or_create_student(student, **listed_name(Person(student)))


def _create_gradebook(file: Path) -> None:
    """Create an empty gradebook with the tables and the schema version that nbgrader gives it.

    nbgrader runs the command ``alembic`` for the version, which costs 2 s of CPU time; this process has
    loaded most of what it needs.
    """
    # Imported here, because it takes half a second and every command of a course loads this module.
    from alembic.config import Config as AlembicConfig
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    settings = AlembicConfig()
    settings.set_main_option("script_location", str(Path(nbgrader.__file__).parent / "alembic"))
    file.touch(0o660)  # SQLite would not let a group of graders write
    engine = create_engine(f"sqlite:///{file}")
    try:
        with engine.begin() as connection:
            Base.metadata.create_all(connection)
            MigrationContext.configure(connection).stamp(ScriptDirectory.from_config(settings), "head")
    finally:
        engine.dispose()


def _write_config(file: Path, function: str, arguments: str) -> None:
    text = f"""\
        # The course's nbgrader configuration; add your settings below the call.
        from pathlib import Path

        from dlo_lib.grading.nbgrader_course import {function}

        c = get_config()
        {function}({arguments})
        """
    if not file.exists():
        write_text(file, dedent(text))


def open_course(folder: str | Path, stock: bool = False) -> NbGraderAPI:
    """Return nbgrader's API of the course in ``folder``, with the instructor's settings.

    Args:
        stock: the stock configuration instead of the judge's.

    Raises:
        UserError: ``folder`` is no course of this library, other users of the machine can enter it, or its
            gradebook is lost or damaged.
    """
    folder = Path(folder).resolve()
    file = folder / STOCK_FOLDER / CONFIG_FILE if stock else folder / CONFIG_FILE
    if not file.is_file() or not (folder / SECRET_FILE).is_file():
        raise no_course(folder)
    enter_course(folder)
    course = NbGraderAPI(config=PyFileConfigLoader(file.name, path=str(file.parent)).load_config())
    if not stock:
        require_gradebook(course)
    return course
