"""A small class, for the tests that grade one: four who handed in, one who did not, and what grading leaves of them.

Its fixtures are for any folder of tests whose conftest.py names them.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.environ import environment
from dlo_lib.grading.nbgrader_course import create_course, open_course
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import LabSource, build_notebook, notebook_text, read_lab, source_folder, source_notebook

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
    own = {"cell_type": "code", "id": "mine", "metadata": {}, "source": "import math", "outputs": [], "execution_count": 3}
    notebook["cells"].insert(3, own)
    return notebook


CLASS = {"ada": right, "blaise": wrong_scale, "chloe": untouched, "dorothy": with_cells_of_their_own}


def make_checkout(folder: Path) -> None:
    """A checkout with the small lab alone."""
    shutil.copytree(SMALL_COURSE, folder, dirs_exist_ok=True)
    (folder / "labs").mkdir()


def make_class(folder: Path, lab: LabSource) -> Path:
    """A course with submissions, none of them graded."""
    create_course(folder, students=[*CLASS, "evariste"])
    build_notebook(lab.folder)
    assert open_course(folder).generate_assignment(LAB)["success"]
    for student, notebook in CLASS.items():
        hand_in(folder, student, json.dumps(notebook(lab)))
    return folder


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the small lab alone; nobody alters it."""
    folder = tmp_path_factory.mktemp("checkout")
    make_checkout(folder)
    return folder


@pytest.fixture(scope="session")
def class_(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with submissions, none of them graded; nobody alters it."""
    with environment({"DLO_COURSE": str(checkout)}):
        return make_class(tmp_path_factory.mktemp("class") / "course", small_lab())


@pytest.fixture(scope="module")
def in_checkout(checkout: Path) -> Iterator[Path]:
    """For fixtures of a module: meanwhile the course's sources are those of the checkout."""
    with environment({"DLO_COURSE": str(checkout)}):
        yield checkout


@pytest.fixture
def ungraded(checkout: Path, class_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the class, for one test, to which the course's sources are those of the checkout."""
    monkeypatch.setenv("DLO_COURSE", str(checkout))
    shutil.copytree(class_, tmp_path / "course", symlinks=True)
    return tmp_path / "course"


def small_lab() -> LabSource:
    """The small lab of the checkout that is the course now."""
    return read_lab(source_folder(find_lab("91", source_labs())))


def hand_in(course: Path, student: str, text: str) -> None:
    folder = course / "submitted" / student / LAB
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.ipynb").write_text(text)
    (folder / "timestamp.txt").write_text(TIMESTAMP)


def results(course: Path) -> list[bytes]:
    return [(course / "grades" / LAB / name).read_bytes() for name in ("results.csv", "results.json")]


OF_A_STUDENT = (
    "join base_cell on base_cell.id = it.cell_id join submitted_notebook on submitted_notebook.id = it.notebook_id "
    "join submitted_assignment on submitted_assignment.id = submitted_notebook.assignment_id order by 1, 2"
)
GRADES = "select student_id, base_cell.name, auto_score, manual_score, extra_credit, needs_manual_grade from grade it "
COMMENTS = "select student_id, base_cell.name, auto_comment, manual_comment from comment it "
SUBMISSIONS = (
    "select student_id, timestamp, extension, late_submission_penalty from submitted_assignment "
    "join submitted_notebook on submitted_notebook.assignment_id = submitted_assignment.id order by 1"
)


def rows(file: Path) -> list[list[tuple]]:
    """The rows of a gradebook that grading writes, without nbgrader's random ids."""
    connection = sqlite3.connect(file)
    try:
        return [connection.execute(query).fetchall() for query in (GRADES + OF_A_STUDENT, COMMENTS + OF_A_STUDENT, SUBMISSIONS)]
    finally:
        connection.close()


def graded_files(course: Path) -> dict[str, bytes]:
    folder = course / "autograded"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
