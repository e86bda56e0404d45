"""The demonstration class: one run of nbgrader's whole cycle over a small lab."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.batch import grade_lab
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import grade_lab_stock
from dlo_lib.grading.classroom.publish.demo_class import Classroom, classroom, number_of_steps
from dlo_lib.grading.judge.client import JudgeClient
from dlo_lib.grading.lab.course import find_lab, source_labs
from tests.grading.two_folders import write_lab

TOML = """
number = 7
name = "sums"
title = "Sums"
core = true
minutes = 10

[steps.double]
needs = ["add"]

[hints]
add = ["Which operator?", "See `int.__add__`.", "`return a ...`"]
double = ["Use add.", "Twice the same.", "`add(a, ...)`"]
"""

TEXT = '''\
# %% [markdown] id="why"
# # Why sums

# %% id="setup"
from dlo_lib.grading import Lab

lab = Lab(globals())

# %% nbgrader={"grade_id": "add", "solution": true}
def add(a, b):
    """The sum of two numbers."""
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_add", "grade": true}
lab.check("add")

# %% nbgrader={"grade_id": "double", "solution": true}
def double(a):
    """Twice a number."""
    ### BEGIN SOLUTION
    return add(a, a)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_double", "grade": true}
lab.check("double")

# %% id="show" tags=["demo"]
print(double(21))
'''

CHECKS = """\
from dlo_lib.grading.checks.contract import check


@check("add", points=1)
def check_add(student, t):
    "Small sums"
    a, b = t.integer(1, 9), t.integer(1, 9)
    t.that(bool(student.add(a, b) == a + b), "add({a}, {b}) is not the sum", a=a, b=b)


@check("double", points=1)
def check_double(student, t):
    "Small doubles"
    a = t.integer(1, 9)
    t.that(bool(student.double(a) == 2 * a), "double({a}) is not twice {a}", a=a)
"""

HIDDEN = """\
from dlo_lib.grading.checks.contract import check

SECRET_OF_THE_HIDDEN_CHECK = 424242


@check("add", points=1)
def check_large_add(student, t):
    "Large sums"
    a = t.integer(SECRET_OF_THE_HIDDEN_CHECK, 10**9)
    t.that(bool(student.add(a, a) == 2 * a), "large numbers are added wrongly")


@check("double", points=2)
def check_large_double(student, t):
    "Large doubles"
    a = t.integer(SECRET_OF_THE_HIDDEN_CHECK, 10**9)
    t.that(bool(student.double(a) == 2 * a), "large numbers are doubled wrongly")
"""

STAGES: list[str] = []
SOURCE: dict[str, tuple[int, bytes]] = {}
"""The files of the course before the class."""


def content_of(course: Path) -> dict[str, tuple[int, bytes]]:
    """Return the mode and the bytes of each file of a course; a folder has no bytes.

    Python writes compiled files beside the checks where it may; root may everywhere.
    """
    found = [path for part in ("solutions", "labs") for path in (course / part).rglob("[!_]*")]
    found = [path for path in found if path.parent.name != "__pycache__"]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for path in found}


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("course")
    files = {"lab.toml": TOML, "07_sums.py": TEXT, "checks/sums.py": CHECKS, "hidden.py": HIDDEN}
    write_lab(root, "07_sums", {**files, "mutants.py": "# planted wrong solutions"})
    return root


@pytest.fixture(scope="module")
def box(course: Path) -> Iterator[Classroom]:
    """One classroom, shared by the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLO_COURSE", str(course))
        for path in (*(course / "solutions").rglob("*"), *(course / "labs").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)  # as in an installation for all users
        SOURCE.update(content_of(course))
        yield classroom(find_lab("sums", source_labs()), course / "classroom", STAGES.append)


@pytest.fixture(scope="module")
def judges(box: Classroom) -> Iterator[JudgeClient]:
    """One judging service for all copies of the classroom's course."""
    with JudgeClient(find_lab("sums", source_labs()), box.folder / "course") as running:
        yield running


@pytest.fixture(autouse=True)
def in_course(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLO_COURSE", str(course))


def grades(box: Classroom) -> dict[str, tuple[dict[str, float], str]]:
    return {row.student: (row.scores, row.status) for row in box.grades.rows}


def test_each_student_earns_what_they_answered(box: Classroom) -> None:
    scores = {student: score for student, (score, _) in grades(box).items()}
    assert scores == {
        "ada": {"add": 2, "double": 3},
        "blaise": {"add": 2, "double": 0},
        "chloe": {"add": 0, "double": 0},
    }


def test_the_table_shows_the_reason_of_each_grade(box: Classroom) -> None:
    statuses = {student: status for student, (_, status) in grades(box).items()}
    assert statuses == {"ada": "GRADED", "blaise": "GRADED", "chloe": "NO_ATTEMPT"}


def test_the_csv_has_one_row_per_student(box: Classroom) -> None:
    assert box.csv.read_text().splitlines() == [
        "student,lab,add,double,seconds_late,penalty,total,max,status",
        "ada,07_sums,2,3,0,0,5,5,GRADED",
        "blaise,07_sums,2,0,0,0,2,5,GRADED",
        "chloe,07_sums,0,0,0,0,0,5,NO_ATTEMPT",
    ]


def test_every_stage_is_reported(box: Classroom) -> None:
    assert len(STAGES) == number_of_steps()
    assert STAGES[0] == "release"


def test_the_installed_course_does_not_change(box: Classroom, course: Path) -> None:
    assert SOURCE.keys() >= {str(course / "solutions" / "07_sums" / "hidden.py")}
    assert content_of(course) == SOURCE
    assert os.environ["DLO_COURSE"] == str(course)


def test_students_never_receive_hidden_files(box: Classroom) -> None:
    for folder in (box.folder / "exchange", box.folder / "students", box.folder / "course" / "release"):
        names = {path.name for path in folder.rglob("*") if path.is_file()}
        assert "sums.ipynb" in names
        assert not names & {"hidden.py", "wrong.py", "07_sums.py"}


def test_feedback_shows_the_verdicts_and_no_hidden_check(box: Classroom) -> None:
    pages = {student: page.read_text(encoding="utf-8") for student, page in box.feedback.items()}
    assert "Small sums" in pages["ada"]
    assert "Large sums" in pages["ada"]
    assert "5 <small>of 5 points" in pages["ada"]
    assert "2 <small>of 5 points" in pages["blaise"]
    for page in pages.values():
        assert "424242" not in page
        assert "SECRET_OF_THE_HIDDEN_CHECK" not in page


def test_every_graded_test_cell_has_an_output(box: Classroom) -> None:
    for graded in (box.folder / "course" / "autograded").glob("*/07_sums/sums.ipynb"):
        cells = [
            cell
            for cell in nbformat.read(graded, as_version=4).cells
            if cell.metadata.get("nbgrader", {}).get("grade")
        ]
        assert len(cells) == 2
        for cell in cells:
            assert 0 <= float(cell.outputs[0].data["text/plain"]) <= cell.metadata.nbgrader.points


def test_stock_nbgrader_gives_the_honest_students_the_same_points(box: Classroom) -> None:
    gradebook = (box.folder / "course" / "gradebook.db").read_bytes()
    stock = grade_lab_stock(find_lab("sums", source_labs()), box.folder / "course")
    assert {row.student: row.scores for row in stock.rows} == {
        row.student: row.scores for row in box.grades.rows
    }
    assert (box.folder / "course" / "gradebook.db").read_bytes() == gradebook
    # nbgrader reads the configuration in the course's root last: it must be the stock one, not the judge's.
    assert open_course(box.folder / "course", stock=True).coursedir.root == str(
        box.folder / "course" / "stock"
    )


def corrupt(notebook: Path) -> None:
    notebook.write_text("{")


def keep_the_work_but_lose_the_metadata(notebook: Path) -> None:
    read = json.loads(notebook.read_text())
    for cell in read["cells"]:
        cell["metadata"] = {}
    notebook.write_text(json.dumps(read))


def forge_points(notebook: Path) -> None:
    read = json.loads(notebook.read_text())
    for cell in read["cells"]:
        if cell["id"].startswith("test_"):
            cell["source"] = ["1000.0"]
            cell["metadata"]["nbgrader"] |= {"points": 1000, "solution": True}
    notebook.write_text(json.dumps(read))


def test_a_broken_or_forged_notebook_affects_only_its_student(
    box: Classroom, judges: JudgeClient, tmp_path: Path
) -> None:
    course = tmp_path / "course"
    shutil.copytree(box.folder / "course", course, symlinks=True)
    for student, damage in {
        "ada": keep_the_work_but_lose_the_metadata,
        "blaise": corrupt,
        "chloe": forge_points,
    }.items():
        notebook = course / "submitted" / student / "07_sums" / "sums.ipynb"
        notebook.chmod(0o644)
        damage(notebook)
    rows = {
        row.student: row for row in grade_lab(find_lab("sums", source_labs()), course, judges=judges).rows
    }
    assert rows["ada"].total == 5
    assert rows["blaise"].total == rows["chloe"].total == 0  # blaise had 2 points before
    assert rows["blaise"].status.startswith("INVALID")


LATE = """
from nbgrader.plugins import LateSubmissionPlugin


class OnePoint(LateSubmissionPlugin):
    def late_submission_penalty(self, student_id, score, total_seconds_late):
        return 1.0


c.AssignLatePenalties.plugin_class = OnePoint
"""


def test_an_instructors_late_penalty_counts(box: Classroom, judges: JudgeClient, tmp_path: Path) -> None:
    course, lab = tmp_path / "course", find_lab("sums", source_labs())
    shutil.copytree(
        box.folder / "course", course, symlinks=True, ignore=shutil.ignore_patterns("blaise", "chloe")
    )
    with open(course / "nbgrader_config.py", "a") as config:
        config.write(LATE)
    with open_course(course).gradebook as gradebook:
        gradebook.update_or_create_assignment(lab.directory, duedate="2020-01-01 12:00:00 UTC")
    rows = {row.student: row for row in grade_lab(lab, course, judges=judges).rows}
    assert (rows["ada"].penalty, rows["ada"].total) == (1, 4)
    assert (rows["blaise"].total, rows["blaise"].status) == (
        0,
        "NO_ATTEMPT",
    )  # in the roster, without submission


def test_grading_without_a_course_or_submissions_names_the_cure(box: Classroom, tmp_path: Path) -> None:
    lab = find_lab("sums", source_labs())
    with pytest.raises(UserError, match="make one with"):
        grade_lab(lab, tmp_path)
    shutil.copytree(
        box.folder / "course", tmp_path / "course", symlinks=True, ignore=shutil.ignore_patterns("submitted")
    )
    with pytest.raises(UserError, match="`dlo collect 07_sums` fetches them"):
        grade_lab(lab, tmp_path / "course")


def test_a_folder_that_is_no_classroom_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="choose an empty folder"):
        classroom(find_lab("sums", source_labs()), tmp_path)
    assert (tmp_path / "thesis.tex").exists()
