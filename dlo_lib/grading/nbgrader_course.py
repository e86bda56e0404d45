"""An nbgrader course whose grades come from the judge.

A course is a folder with an ``nbgrader_config.py`` of one call, :func:`configure`: its sources are the checkout's ``solutions/``; its
gradebook, releases, submissions and feedback are its own. In it ``nbgrader autograde``, formgrader's buttons and ``dlo grade`` all judge
submissions in other processes. ``stock/`` inside it is a second configuration, :func:`configure_stock`, in which nbgrader runs the
notebooks itself, as a cross-check: it has a gradebook of its own and trusts the student's kernel.
``dlo course FOLDER`` makes one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from textwrap import dedent

from nbgrader.api import Gradebook
from nbgrader.apps.api import NbGraderAPI
from nbgrader.converters import Autograde
from nbgrader.preprocessors import Execute, SaveCells
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.grading.course import course_root
from dlo_lib.grading.environ import environment
from dlo_lib.grading.judge_cells import SECRET_FILE, ExecuteWithHidden, JudgeCells, SubmissionExporter
from dlo_lib.grading.release import LEFT_BY_TOOLS, NEVER, RELEASE_STEPS, RefuseLeaks

COURSE_ID = "dlo"
CONFIG_FILE = "nbgrader_config.py"
STOCK_FOLDER = "stock"
TEXT_SOURCES = "[0-9][0-9]_*.py"
STOCK_CELL_SECONDS = 300  # nbgrader's 30 s is too short for a cell that trains


def configure(c: Config, folder: str | Path, exchange: str | Path | None = None) -> None:
    """Set up ``c`` for the course in ``folder``: grading asks the judge.

    Args:
        exchange: the folder that students fetch from and submit to; nbgrader's own default without.
    """
    _configure_release(c, Path(folder).resolve())
    if exchange is not None:
        c.Exchange.root = str(exchange)
    c.Autograde.exporter_class = SubmissionExporter  # reads any file and rebuilds the notebook from the release
    c.Autograde.sanitize_preprocessors = []
    c.Autograde.autograde_preprocessors = [JudgeCells if step is Execute else step for step in Autograde().autograde_preprocessors]
    c.GenerateFeedback.exporter_class = "dlo_lib.grading.feedback.FeedbackExporter"  # by name: loaded only where feedback is made
    c.GenerateFeedback.preprocessors = []


def configure_stock(c: Config, folder: str | Path) -> None:
    """Set up ``c`` for the course in ``folder``, the ``stock/`` of another: its submissions, run by nbgrader's own kernel."""
    _configure_release(c, Path(folder).resolve())
    c.Autograde.autograde_preprocessors = [ExecuteWithHidden if step is Execute else step for step in Autograde().autograde_preprocessors]
    c.Execute.timeout = STOCK_CELL_SECONDS


def _configure_release(c: Config, folder: Path) -> None:
    c.CourseDirectory.root = str(folder)
    c.CourseDirectory.course_id = COURSE_ID
    c.CourseDirectory.source_directory = "solutions"
    c.CourseDirectory.release_directory = "release"
    # .html: nbgrader would publish a page that a student handed in (or a link to a file of the instructor's) as the student's feedback
    c.CourseDirectory.ignore = [*LEFT_BY_TOOLS, "*.pyc", "feedback", *NEVER, TEXT_SOURCES, "*.html"]
    c.GenerateAssignment.preprocessors = [*RELEASE_STEPS, SaveCells, RefuseLeaks]


def create_course(folder: str | Path, exchange: str | Path | None = None, students: Collection[str] = ()) -> Path:
    """Make a course in ``folder``, or bring an existing one up to date: its configurations, its secret and its roster.

    Grades, submissions and the secret of an existing course stay; a configuration that the instructor changed stays too.
    """
    folder = Path(folder).resolve()
    (folder / STOCK_FOLDER).mkdir(parents=True, exist_ok=True)
    _link(folder / "solutions", course_root() / "solutions")
    # A course of its own rather than options of this one: nbgrader's commands read the configuration in the course's root last.
    for shared in ("solutions", "submitted"):
        _link(folder / STOCK_FOLDER / shared, Path("..") / shared)
    if not (folder / SECRET_FILE).exists():
        # Inputs of the checks are drawn from it, so that they are the same for the whole class and for each regrade.
        with open(os.open(folder / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    given = "" if exchange is None else f", exchange={str(exchange)!r}"
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
    new = not gradebook_file.exists()
    # nbgrader makes a gradebook with the command `alembic`, which is beside this Python also where the environment is not activated.
    with environment({"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}):
        for file in (gradebook_file, stock_file):
            if new and file is stock_file:
                shutil.copyfile(gradebook_file, stock_file)  # saves the seconds of a second `alembic`
            with Gradebook(f"sqlite:///{file}", COURSE_ID) as gradebook:
                for student in students:
                    gradebook.update_or_create_student(student)


def _write_config(file: Path, function: str, arguments: str) -> None:
    text = f"""\
        # The course's nbgrader configuration; settings of your own go below the call.
        from pathlib import Path

        from dlo_lib.grading.nbgrader_course import {function}

        c = get_config()
        {function}({arguments})
        """
    if not file.exists():
        write_text(file, dedent(text))


def open_course(folder: str | Path, stock: bool = False) -> NbGraderAPI:
    """nbgrader's programming interface to the course in ``folder``, with the instructor's own settings.

    Args:
        stock: the stock configuration instead of the judge's.

    Raises:
        UserError: there is no course of ours in ``folder``.
    """
    folder = Path(folder).resolve()
    file = folder / STOCK_FOLDER / CONFIG_FILE if stock else folder / CONFIG_FILE
    if not file.is_file() or not (folder / SECRET_FILE).is_file():
        raise UserError(f"no course in {folder}: make one with `dlo course {folder}`")
    return NbGraderAPI(config=PyFileConfigLoader(file.name, path=str(file.parent)).load_config())
