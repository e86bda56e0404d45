"""The lab as text: its cells, their kinds, what students get of them, and every rule of the
layout with its own message."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.source import CellKind, notebook_text, read_lab, source_notebook
from tests.grading.two_folders import place_of, write_lab

TOML = """
number = 7
name = "sums"
title = "Sums"
core = true
minutes = 10

[steps.double]
needs = ["add"]

[quiz.q1]
text = "Which?"
a = "this"
b = "that"
"""

CHECKS = """\
@check("add", points=2)
def check_add(student, t): ...


@check("double", points=0.5)
def check_double(student, t): ...
"""

HIDDEN = """\
@check(points=1, question="double")
def check_large(student, t): ...
"""

TEXT = '''\
# %% [markdown] id="why"
# # Why
#
# Because.

# %% id="setup"
from dlo_lib.grading import Lab

lab = Lab(globals())

# %% nbgrader={"grade_id": "add", "solution": true}
def add(a, b):
    """The sum."""
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_add", "grade": true}
lab.check("add")

# %% nbgrader={"grade_id": "double", "solution": true}
def double(a):
    ### BEGIN SOLUTION
    return add(a, a)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_double", "grade": true}
lab.check("double")

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": ""}
quiz = {"q1": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% id="plot" tags=["demo"]
print(double(2))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"lab.toml": TOML, "07_sums.py": TEXT, "checks/sums.py": CHECKS, "hidden.py": HIDDEN}
    return write_lab(tmp_path, "07_sums", files)


def test_the_code_of_a_long_demo_is_folded(folder: Path) -> None:
    """Not where the text speaks of the code, and never code that an exercise stands on."""
    lines = "".join(f"\nprint({n})" for n in range(13))
    text = TEXT.replace("print(double(2))", lines[1:]).replace("def add(a", "#\n" * 13 + "def add(a")
    text += f'\n# %% id="loop" tags=["demo", "read"]{lines}\n\n# %% id="given"{lines}\n'
    text += f'\n# %% id="short" tags=["demo"]{lines.removesuffix(chr(10) + "print(12)")}\n'
    (folder / "07_sums.py").write_text(text)
    cells = source_notebook(folder).cells
    assert [cell.id for cell in cells if "jupyter" in cell.metadata] == ["plot"]
    assert next(cell for cell in cells if cell.id == "plot").metadata["jupyter"] == {"source_hidden": True}


def test_each_cell_has_its_kind(folder: Path) -> None:
    kinds = {cell.id: cell.kind for cell in read_lab(folder).cells}
    assert kinds["why"] is CellKind.TEXT
    assert kinds["setup"] is CellKind.GIVEN
    assert kinds["plot"] is CellKind.DEMO
    assert kinds["add"] is CellKind.SOLUTION
    assert kinds["test_add"] is CellKind.TEST


def test_the_first_code_cell_tells_students_not_to_edit_it(folder: Path) -> None:
    cells = {cell.id: cell for cell in read_lab(folder).cells}
    assert cells["setup"].released.splitlines()[0].startswith("# Given: grading runs this cell as released.")
    assert [cell.id for cell in cells.values() if "grading runs" in cell.released] == ["setup"]


def test_questions_come_from_the_test_cells_and_points_from_the_checks(folder: Path) -> None:
    lab = read_lab(folder)
    assert lab.questions == ("add", "double", "quiz")
    assert [lab.test(question).points for question in lab.questions] == [2, 1.5, 2]
    assert lab.points == 5.5
    assert lab.info.needs["double"] == ("add",)


def test_students_get_a_stub_where_the_solution_was(folder: Path) -> None:
    add = read_lab(folder).solution("add")
    assert "return a + b" in add.source
    assert (
        add.released
        == 'def add(a, b):\n    """The sum."""\n    # YOUR CODE HERE\n    raise NotImplementedError()'
    )


def test_a_region_may_name_the_line_that_replaces_it(folder: Path) -> None:
    assert read_lab(folder).solution("quiz").released == 'quiz = {"q1": ""}'


def test_no_solution_is_left_in_a_released_cell(folder: Path) -> None:
    released = "\n".join(cell.released for cell in read_lab(folder).cells)
    assert "SOLUTION" not in released
    assert '"b"' not in released


def test_the_notebook_has_stable_ids_complete_metadata_and_no_outputs(folder: Path) -> None:
    notebook = source_notebook(folder)
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in read_lab(folder).cells]
    assert notebook.cells[3].metadata.nbgrader == {
        "grade": True,
        "grade_id": "test_add",
        "locked": True,
        "points": 2,
        "schema_version": 3,
        "solution": False,
        "task": False,
    }
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert notebook.metadata.dlo.lab == "07_sums"


def test_building_twice_gives_the_same_bytes(folder: Path) -> None:
    assert notebook_text(source_notebook(folder)) == notebook_text(source_notebook(folder))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (' id="setup"', "", "begins 'from dlo_lib.grading import Lab' needs an id"),
        ('id="setup"', 'id="set up"', "needs an id of letters"),
        ('id="setup"', 'id="why"', "two cells have the id 'why'"),
        ('id="setup"', 'id="setup" kind="given"', "has 'kind' in its header"),
        (
            '"test_add", "grade": true',
            '"test_add", "grade": true, "points": 2',
            "has 'points' in its nbgrader metadata",
        ),
        (
            '"grade_id": "test_add"',
            '"grade_id": "test_ad"',
            'unknown question of test cell test_ad in 07_sums.py "ad": did you mean add',
        ),
        ('"grade_id": "test_add"', '"grade_id": "checks_add"', "must be called test_<question>"),
        ('lab.check("add")', 'lab.check("double")', r'must hold one line, lab.check\("add"\)'),
        (
            "    ### END SOLUTION\n\n# %% nbg",
            "\n# %% nbg",
            "'add' has 1 '### BEGIN SOLUTION' and 0 '### END SOLUTION'",
        ),
        (
            "    ### BEGIN SOLUTION\n    return a + b\n    ### END SOLUTION",
            "    return a + b",
            "'add' has 0 '### BEGIN SOLUTION'",
        ),
        (
            "print(double(2))",
            "### BEGIN SOLUTION\nprint()\n### END SOLUTION",
            "'plot' has 1 '### BEGIN SOLUTION'",
        ),
        (
            '# %% nbgrader={"grade_id": "test_quiz", "grade": true}\nlab.check("quiz")\n',
            "",
            "'quiz' has no test cell",
        ),
        ("def double(a):\n    ###", "def double(a)\n    ###", "as students get it, 'double' is not Python"),
    ],
)
def test_a_source_that_breaks_a_rule_says_where_and_how_to_mend_it(
    folder: Path, old: str, new: str, message: str
) -> None:
    text = folder / "07_sums.py"
    assert old in TEXT
    text.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        read_lab(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"add", points=2',
            '"add", points=0',
            "'test_add' has no points: no check is for 'add', or its checks have none",
        ),
        (
            '"add", points=2',
            '"ad", points=2',
            "'test_add' has no points: no check is for 'add', or its checks have none",
        ),
        (
            '"add", points=2',
            '"add", points=TWO',
            r"sums.py, line 1: give the question and its points as literals",
        ),
        ('"add", points=2', '"add"', r"sums.py, line 1: give the question and its points as literals"),
    ],
)
def test_points_are_read_from_the_checks(folder: Path, old: str, new: str, message: str) -> None:
    place_of(folder, "checks/sums.py").write_text(CHECKS.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        read_lab(folder)


def test_a_test_cell_comes_after_its_solution(folder: Path) -> None:
    head, setup, *cells = TEXT.split("\n# %%")
    cells[0], cells[1] = cells[1], cells[0]
    (folder / "07_sums.py").write_text("\n# %%".join([head, setup, *cells]))
    with pytest.raises(UserError, match="'test_add' comes before its solution cell"):
        read_lab(folder)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ('double]\nneeds = ["ad"]', "did you mean add"),
        ('add]\nneeds = ["double"]', "add needs double, which does not come before it"),
    ],
)
def test_needs_name_earlier_questions(folder: Path, needs: str, message: str) -> None:
    place_of(folder, "lab.toml").write_text(TOML.replace('double]\nneeds = ["add"]', needs))
    with pytest.raises(UserError, match=message):
        read_lab(folder)


def test_a_lab_without_its_text_says_what_the_file_is_called(folder: Path) -> None:
    (folder / "07_sums.py").unlink()
    with pytest.raises(UserError, match=r"no 07_sums\.py in"):
        read_lab(folder)
