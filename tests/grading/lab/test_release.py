"""A release is an allow-list of labs/ and what is built from solutions/: deterministic, the same as that of
nbgrader, and never more than it says."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.publish.publication import fill_source
from dlo_lib.grading.lab.course import QUIZ_ANSWERS_FILE, LabInfo, find_lab, source_labs
from dlo_lib.grading.lab.release import (
    check_course_in_step,
    check_in_step,
    release_lab,
    released_files,
)
from tests.grading.two_folders import write_lab

REAL_LABS = Path(__file__).parents[3] / "labs"
TOML = """
number = 7
name = "sums"
title = "Sums"
core = true
minutes = 10
release = ["figures/*.svg"]

[quiz.q1]
text = "Which?"
a = "this"
b = "that"
"""

TEXT = """\
# %% [markdown] id="why"
# # Why

# %% nbgrader={"grade_id": "setup", "locked": true}
from dlo_lib.grading import Lab

lab = Lab(globals())

# %% nbgrader={"grade_id": "add", "solution": true}
def add(a, b):
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_add", "grade": true}
lab.check("add")

# %% id="show" tags=["demo", "nbval-check-output"]
print(add(1, 2))

# %% id="given" tags=["nbval-check-output"]
print(add(3, 4))

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": ""}
quiz = {"q1": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")
"""

VISIBLE = """\
@check("add", points=2)
def check_add(student, t):
    "Sums"
"""

RELEASED = {
    "sums.ipynb", "checks/sums.py", "figures.py", "references.json", "in_grading.json", "lab.toml",
    "quiz_answers.json", "figures/why.svg",
}  # fmt: skip


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "lab.toml": TOML,
        "07_sums.py": TEXT,
        "checks/sums.py": VISIBLE,
        "hidden.py": 'ANSWERS = {"q1": Answer("b", "the answer is b")}\n',
    }
    files["figures.py"] = "# drawings"
    files |= {"mutants.py": "# wrong", "figures/why.svg": "<svg/>"}
    write_lab(tmp_path, "07_sums", files)
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    return tmp_path


@pytest.fixture
def lab(course: Path) -> LabInfo:
    return source_labs()[0]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def for_a_class(files: dict[str, bytes]) -> dict[str, bytes]:
    """What the exchange of a class gets of a release: everything except the answers of the quiz."""
    assert QUIZ_ANSWERS_FILE in files
    return {name: content for name, content in files.items() if name != QUIZ_ANSWERS_FILE}


def test_students_get_the_allow_list_and_nothing_else(lab: LabInfo) -> None:
    assert files_of(release_lab(lab)).keys() == RELEASED


def test_releasing_twice_gives_the_same_bytes(lab: LabInfo) -> None:
    first = files_of(release_lab(lab))
    assert files_of(release_lab(lab)) == first == released_files(lab)


def test_the_release_holds_no_answer(lab: LabInfo) -> None:
    for content in files_of(release_lab(lab)).values():
        assert b"return a + b" not in content  # the reference is encoded
        assert b"answer is b" not in content


def test_the_tag_of_an_output_that_nbval_compares_is_not_released(lab: LabInfo) -> None:
    notebook = nbformat.reads(released_files(lab)[lab.notebook].decode(), as_version=4)
    tags = {cell.id: cell.metadata.get("tags") for cell in notebook.cells}
    assert (tags["show"], tags["given"]) == (["demo"], None)


def test_test_cells_are_locked_and_solutions_cannot_be_deleted(lab: LabInfo) -> None:
    notebook = nbformat.read(release_lab(lab) / "sums.ipynb", as_version=4)
    cells = {cell.id: cell.metadata for cell in notebook.cells}
    assert cells["test_add"]["editable"] is False
    assert cells["add"]["deletable"] is False
    assert "editable" not in cells["add"]


def test_nbgraders_own_release_has_the_same_bytes(lab: LabInfo, course: Path) -> None:
    (course / "solutions" / lab.directory / "INSTRUCTOR.md").write_text("# The answers\n")
    opened = open_course(create_course(course / "course", course / "exchange"))
    fill_source(opened, lab)
    result = opened.generate_assignment(lab.directory)
    assert result["success"], result.get("error")
    assert files_of(course / "course" / "release" / lab.directory) == for_a_class(released_files(lab))


@pytest.mark.parametrize("directory", sorted(path.parent.name for path in REAL_LABS.glob("*/lab.toml")))
def test_nbgrader_releases_each_lab_of_the_course(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLO_COURSE", str(REAL_LABS.parent))
    course = open_course(create_course(tmp_path / "course", tmp_path / "exchange"))
    fill_source(course, find_lab(directory, source_labs()))
    result = course.generate_assignment(directory)
    assert result["success"], (result.get("error"), result.get("log"))
    released = files_of(tmp_path / "course" / "release" / directory)
    assert released == for_a_class(files_of(REAL_LABS / directory)), "make labs was not run"


def test_nbgrader_refuses_to_release_what_the_allow_list_lacks(lab: LabInfo, course: Path) -> None:
    opened = open_course(create_course(course / "course", course / "exchange"))
    (fill_source(opened, lab) / "figures" / "draft.txt").write_text("notes")
    result = opened.generate_assignment(lab.directory)
    assert not result["success"]
    assert "would hold figures/draft.txt" in result["log"]
    assert not (course / "course" / "release" / lab.directory).exists()
    fill_source(opened, lab)
    assert opened.generate_assignment(lab.directory)["success"], "what was left there is removed"


@pytest.mark.parametrize("pattern", ["hidden.py", "mutants.py", "INSTRUCTOR.md", "*.py", "**/*"])
def test_what_students_must_never_have_cannot_be_listed(lab: LabInfo, course: Path, pattern: str) -> None:
    given = course / "labs" / "07_sums"
    for name in ("hidden.py", "mutants.py", "INSTRUCTOR.md", "07_sums.py"):
        (given / name).write_text("# The answers\n")
    (given / "lab.toml").write_text(TOML.replace("figures/*.svg", pattern))
    with pytest.raises(UserError, match="must never be released"):
        release_lab(source_labs()[0])
    assert not (given / lab.notebook).exists()


def test_a_pattern_that_matches_nothing_is_an_error(lab: LabInfo, course: Path) -> None:
    (course / "labs" / "07_sums" / "lab.toml").write_text(TOML.replace(".svg", ".png"))
    with pytest.raises(UserError, match="nothing matches"):
        release_lab(source_labs()[0])


def test_each_kind_of_difference_is_named_with_its_cure(lab: LabInfo, course: Path) -> None:
    released = release_lab(lab)
    assert check_in_step(lab) == []
    (released / "sums.ipynb").write_text("{}")
    (released / "references.json").unlink()
    (released / "hidden.py").write_text("# slipped in")
    (course / "solutions" / "07_sums" / "figures.py").write_text("# in the old place")
    (course / "solutions" / "07_sums" / "references.json").write_text("{}")
    (course / "labs" / "08_gone").mkdir()
    hidden, missing, notebook, old, built, orphan = check_course_in_step()
    assert "hidden.py is not part of the release: list it under release in lab.toml, or move it to" in hidden
    assert "references.json is missing: run `make labs`" in missing
    assert "sums.ipynb differs from its source: run `make labs`" in notebook
    assert "solutions/07_sums/figures.py is in the wrong folder: students get it, so move it to" in old
    assert built.endswith("labs/07_sums now: remove it")
    assert "08_gone has no source" in orphan


def test_releasing_again_writes_what_is_built_and_removes_nothing(lab: LabInfo) -> None:
    released = release_lab(lab)
    (released / "sums.ipynb").write_text("{}")
    release_lab(lab)
    assert check_in_step(lab) == []
    (released / "draft.py").write_text("# an hour of work")
    with pytest.raises(UserError, match=r"draft\.py is not part of the release"):
        release_lab(lab)
    assert (released / "draft.py").read_text() == "# an hour of work"
