"""Grading a class: one row a student, the same rows whatever happens to the grader, and a gradebook as nbgrader itself leaves it."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.errors import UserError
from dlo_lib.grading.batch import Done, Options, grade_lab
from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.export import GradeTable
from dlo_lib.grading.nbgrader_course import create_course, open_course
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import LabSource, build_notebook, notebook_text, read_lab, source_folder, source_notebook

SMALL_COURSE = Path(__file__).parent / "small_course"
LAB = "91_small"
TIMESTAMP = "2026-11-20 12:00:00.000000 UTC"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout with the small lab alone."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(SMALL_COURSE, folder, dirs_exist_ok=True)
    (folder / "labs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLO_COURSE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def in_checkout(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLO_COURSE", str(home))


@pytest.fixture(scope="module")
def lab(home: Path) -> LabSource:
    return read_lab(source_folder(find_lab("91", source_labs())))


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


@pytest.fixture(scope="module")
def class_(home: Path, lab: LabSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with submissions, none of them graded; copied by each test."""
    folder = create_course(tmp_path_factory.mktemp("class") / "course", students=[*CLASS, "evariste"])
    course = open_course(folder)
    build_notebook(lab.folder)
    assert course.generate_assignment(LAB)["success"]
    for student, notebook in CLASS.items():
        hand_in(folder, student, json.dumps(notebook(lab)))
    return folder


@pytest.fixture
def course(class_: Path, tmp_path: Path) -> Path:
    shutil.copytree(class_, tmp_path / "course", symlinks=True)
    return tmp_path / "course"


def hand_in(course: Path, student: str, text: str) -> None:
    folder = course / "submitted" / student / LAB
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.ipynb").write_text(text)
    (folder / "timestamp.txt").write_text(TIMESTAMP)


def grade(course: Path, **options: Any) -> GradeTable:
    return grade_lab(find_lab("91", source_labs()), course, options=Options(**{"jobs": 2, "unsafe": True, **options}))


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


@pytest.fixture(scope="module")
def undisturbed(class_: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The class graded in one go."""
    course = tmp_path_factory.mktemp("undisturbed") / "course"
    shutil.copytree(class_, course, symlinks=True)
    grade(course)
    return course


def test_every_student_of_the_roster_has_a_row_with_the_status_of_each_question(undisturbed: Path) -> None:
    table = json.loads(results(undisturbed)[1])
    status = {row["student"]: row["status"].removesuffix(" (UNSANDBOXED)") for row in table["rows"]}
    assert status == {"ada": "GRADED", "blaise": "GRADED", "chloe": "NO_ATTEMPT", "dorothy": "GRADED", "evariste": "NO_ATTEMPT"}
    totals = {row["student"]: row["total"] for row in table["rows"]}
    assert totals["ada"] == totals["dorothy"] == 12
    assert 0 < totals["blaise"] < 12
    assert totals["chloe"] == totals["evariste"] == 0
    assert all(set(row["questions"]) == {"scale", "quantise", "mean", "quiz"} for row in table["rows"])


def test_two_runs_with_and_without_company_give_the_same_bytes(undisturbed: Path, course: Path) -> None:
    grade(course, jobs=1)
    assert results(course) == results(undisturbed)
    assert all(timing not in results(course)[1] for timing in (b"seconds", str(course).encode()))


def test_gradebook_and_graded_notebooks_are_those_of_nbgraders_own_command(undisturbed: Path, course: Path) -> None:
    with open(course / "nbgrader_config.py", "a") as config:
        config.write("\nc.JudgeCells.unsafe = True\n")
    done = subprocess.run([sys.executable, "-m", "nbgrader", "autograde", LAB], cwd=course, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert rows(course / "gradebook.db") == rows(undisturbed / "gradebook.db")
    assert graded_files(course) == graded_files(undisturbed)


def grader(course: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from dlo_lib.cli import main; main()", "grade", "91", "--unsafe", "--jobs", "2", *options]
    return subprocess.Popen(command, cwd=course, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_the_table_is_the_same(undisturbed: Path, course: Path) -> None:
    moments = random.Random(7)
    for _ in range(3):
        process = grader(course, "--resume")
        time.sleep(moments.uniform(2, 9))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = grader(course, "--resume")
    assert process.communicate()[1] == b""
    assert process.returncode == 0
    assert results(course) == results(undisturbed)
    assert rows(course / "gradebook.db") == rows(undisturbed / "gradebook.db")
    assert graded_files(course) == graded_files(undisturbed)


def test_resuming_judges_only_what_has_changed(undisturbed: Path, tmp_path: Path, lab: LabSource) -> None:
    course = tmp_path / "course"
    shutil.copytree(undisturbed, course, symlinks=True)
    reports = {path.name: path.stat().st_mtime_ns for path in (course / "grades" / LAB / "reports").glob("*.json")}
    hand_in(course, "blaise", json.dumps(right(lab)))
    table = grade(course, resume=True)
    again = [name for name, then in reports.items() if (course / "grades" / LAB / "reports" / name).stat().st_mtime_ns != then]
    assert [name.split("-")[0] for name in again] == ["blaise"]
    assert {row.student: row.total for row in table.rows}["blaise"] == 12


def test_one_student_is_graded_again_and_the_other_rows_stay(undisturbed: Path, tmp_path: Path) -> None:
    course = tmp_path / "course"
    shutil.copytree(undisturbed, course, symlinks=True)
    hand_in(course, "ada", "{")
    seen: list[Done] = []
    table = grade_lab(find_lab("91", source_labs()), course, seen.append, Options(only="ada", unsafe=True))
    assert [done.student for done in seen] == ["ada"]
    row = {row.student: row for row in table.rows}
    assert row["ada"].status.startswith("INVALID(damaged")
    assert row["ada"].total == 0  # 12 before: a score never outlives its submission
    before, after = ([line for line in results(folder)[0].splitlines() if not line.startswith(b"ada")] for folder in (undisturbed, course))
    assert before == after


def test_a_student_who_handed_in_nothing_cannot_be_graded_alone(course: Path) -> None:
    with pytest.raises(UserError, match="evariste has handed in nothing of 91_small"):
        grade(course, only="evariste")


def test_manual_grades_survive_a_regrade(undisturbed: Path, tmp_path: Path) -> None:
    course = tmp_path / "course"
    shutil.copytree(undisturbed, course, symlinks=True)
    with open_course(course).gradebook as gradebook:
        given = gradebook.find_grade("test_scale", "small", LAB, "blaise")
        given.manual_score, given.needs_manual_grade = 2.5, False
        gradebook.db.commit()
    scores = {row.student: row.scores["scale"] for row in grade(course, only="blaise").rows}
    assert scores["blaise"] == 2.5
    with open_course(course).gradebook as gradebook:
        assert gradebook.find_grade("test_scale", "small", LAB, "blaise").needs_manual_grade  # nbgrader asks for a second look


def test_a_second_grader_on_the_same_lab_says_so_and_stops(course: Path) -> None:
    folder = course / "grades" / LAB
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        first.write("4711\n")
        first.flush()
        process = grader(course)
        said = process.communicate()[1].decode()
    assert process.returncode == 2
    assert "another grader (process 4711) is at work" in said
    assert not (folder / "results.csv").exists()


def renamed(folder: Path) -> None:
    (folder / "small.ipynb").rename(folder / "small (2).ipynb")


def no_notebook(folder: Path) -> None:
    (folder / "small.ipynb").unlink()


def a_pipe(folder: Path) -> None:
    (folder / "small.ipynb").unlink()
    os.mkfifo(folder / "small.ipynb")


def a_link_beside_it(folder: Path) -> None:
    (folder / "notes.txt").symlink_to("/etc/passwd")


def a_pipe_beside_it(folder: Path) -> None:
    os.mkfifo(folder / "notes.txt")


def no_time(folder: Path) -> None:
    (folder / "timestamp.txt").write_text("yesterday, in 9999999999 B.C.")


ODD: dict[Callable[[Path], None], str] = {
    renamed: "GRADED_WARN",
    no_notebook: "INVALID",
    a_pipe: "INVALID",
    a_link_beside_it: "GRADED",
    a_pipe_beside_it: "GRADED",
    no_time: "GRADED",
}


def test_odd_folders_cost_nobody_else_anything(undisturbed: Path, course: Path, lab: LabSource) -> None:
    for damage in ODD:
        hand_in(course, damage.__name__, json.dumps(right(lab)))
        damage(course / "submitted" / damage.__name__ / LAB)
    table = {row.student: row for row in grade(course).rows}
    for damage, status in ODD.items():
        assert table[damage.__name__].status.startswith(status), damage.__name__
        assert table[damage.__name__].total == (0 if status == "INVALID" else 12)
    honest = [line for line in results(course)[0].splitlines() if line.split(b",")[0].decode() in {*CLASS, "evariste", "student"}]
    assert honest == results(undisturbed)[0].splitlines()
    assert not list((course / "autograded").rglob("notes.txt"))


def test_a_lab_whose_own_answer_fails_grades_nobody(course: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "checkout"
    shutil.copytree(home, broken)
    text = broken / "solutions" / LAB / "91_small.py"
    text.write_text(text.read_text().replace("/ 127", "/ 128"))
    monkeypatch.setenv("DLO_COURSE", str(broken))
    with pytest.raises(UserError, match="the reference solution of 91_small does not score full marks"):
        grade(course)
