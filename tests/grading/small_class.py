"""A small class for tests that grade: four students with and one without submission, and the results of
grading.

The fixtures can be used in any folder of tests whose conftest.py imports them.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.publish.publication import fill_source
from dlo_lib.grading.judge.client import RECORD_FILE, JudgeClient
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import (
    LabSource,
    notebook_text,
    read_lab,
    source_folder,
    source_notebook,
)

SMALL_COURSE = Path(__file__).parent / "small_course"
LAB = "91_small"
TIMESTAMP = "2026-11-20 12:00:00.000000 UTC"


def right(lab: LabSource) -> dict[str, Any]:
    return json.loads(notebook_text(source_notebook(lab.folder)))


def untouched(lab: LabSource) -> dict[str, Any]:
    return json.loads(notebook_text(release_notebook(lab.folder)))


def wrong_scale(lab: LabSource) -> dict[str, Any]:
    notebook = right(lab)
    for cell in notebook["cells"]:
        if cell["id"] == "scale":
            cell["source"] = "def absmax_scale(x):\n    return x.amax(dim=1) / 127"
    return notebook


def with_cells_of_their_own(lab: LabSource) -> dict[str, Any]:
    notebook = right(lab)
    own = {
        "cell_type": "code",
        "id": "mine",
        "metadata": {},
        "source": "import math",
        "outputs": [],
        "execution_count": 3,
    }
    notebook["cells"].insert(3, own)
    return notebook


CLASS = {"ada": right, "blaise": wrong_scale, "chloe": untouched, "dorothy": with_cells_of_their_own}


def make_checkout(folder: Path) -> None:
    """Create a checkout with only the small lab."""
    shutil.copytree(SMALL_COURSE, folder, dirs_exist_ok=True)


def make_class(folder: Path, lab: LabSource) -> Path:
    """Create a course with ungraded submissions."""
    create_course(folder, students=[*CLASS, "evariste"])
    course = open_course(folder)
    fill_source(course, lab.info)
    assert course.generate_assignment(LAB)["success"]
    for student, notebook in CLASS.items():
        hand_in(folder, student, json.dumps(notebook(lab)))
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder ``name`` that ``make`` fills, once for all workers of pytest-xdist.
    Tests must not change it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = root / name, root / f"{name}.made"
    with FileLock(root / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker whose attempt failed
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the small lab alone. Tests must not change it."""
    return made_once(tmp_path_factory, "small-checkout", make_checkout)


@pytest.fixture(scope="session")
def class_(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with submissions, none of them graded. Tests must not change it."""
    with environment({"DLO_COURSE": str(checkout)}):
        return made_once(tmp_path_factory, "small-class", lambda folder: make_class(folder, small_lab()))


@pytest.fixture(scope="session")
def judges(checkout: Path, class_: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeClient]:
    """One judging service without a sandbox, for all copies of the class: they have the same
    lab and the same secret."""
    course = tmp_path_factory.mktemp("judges") / "course"  # where the service leaves its log and its record
    shutil.copytree(class_, course, symlinks=True)
    with environment({"DLO_COURSE": str(checkout)}):
        running = JudgeClient(find_lab("91", source_labs()), course, unsafe=True)
    with running:
        yield running


@pytest.fixture(scope="session")
def graded_class(
    checkout: Path, class_: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A copy of the class, graded without interruption on this machine, with the record of its proof.
    Tests must not change it."""

    def make(course: Path) -> None:
        shutil.copytree(class_, course, symlinks=True)
        lab, service = find_lab("91", source_labs()), request.getfixturevalue("judges")
        grade_lab(lab, course, options=Options(jobs=2, unsafe=True), judges=service)
        record = Path("grades") / LAB / RECORD_FILE
        shutil.copyfile(service.course / record, course / record)

    with environment({"DLO_COURSE": str(checkout)}):
        return made_once(tmp_path_factory, "small-class-graded", make)


@pytest.fixture(scope="module")
def in_checkout(checkout: Path) -> Iterator[Path]:
    """For fixtures of a module: use the checkout as the source of the course."""
    with environment({"DLO_COURSE": str(checkout)}):
        yield checkout


@pytest.fixture
def ungraded(checkout: Path, class_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the class for one test, with the checkout as the source of the course."""
    monkeypatch.setenv("DLO_COURSE", str(checkout))
    shutil.copytree(class_, tmp_path / "course", symlinks=True)
    return tmp_path / "course"


def small_lab() -> LabSource:
    """Return the small lab of the current checkout."""
    return read_lab(source_folder(find_lab("91", source_labs())))


def hand_in(course: Path, student: str, text: str) -> None:
    folder = course / "submitted" / student / LAB
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.ipynb").write_text(text)
    (folder / "timestamp.txt").write_text(TIMESTAMP)


def results(course: Path) -> list[bytes]:
    return [(course / "grades" / LAB / name).read_bytes() for name in ("results.csv", "results.json")]


OF_A_STUDENT = (
    "join base_cell on base_cell.id = it.cell_id "
    "join submitted_notebook on submitted_notebook.id = it.notebook_id "
    "join submitted_assignment on submitted_assignment.id = submitted_notebook.assignment_id order by 1, 2"
)
GRADES = (
    "select student_id, base_cell.name, auto_score, manual_score, extra_credit, "
    "needs_manual_grade from grade it "
)
COMMENTS = "select student_id, base_cell.name, auto_comment, manual_comment from comment it "
SUBMISSIONS = (
    "select student_id, timestamp, extension, late_submission_penalty from submitted_assignment "
    "join submitted_notebook on submitted_notebook.assignment_id = submitted_assignment.id order by 1"
)


def rows(file: Path) -> list[list[tuple]]:
    """Return the rows of a gradebook that grading writes, without nbgrader's random ids."""
    connection = sqlite3.connect(file)
    try:
        return [
            connection.execute(query).fetchall()
            for query in (GRADES + OF_A_STUDENT, COMMENTS + OF_A_STUDENT, SUBMISSIONS)
        ]
    finally:
        connection.close()


def graded_files(course: Path) -> dict[str, bytes]:
    folder = course / "autograded"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
