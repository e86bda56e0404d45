"""What is graded is the release with the student's answers: nothing else a student's file holds comes through, and no file stops it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.course import LabInfo, source_labs
from dlo_lib.grading.rebuild import MOST_CHARACTERS, rebuild
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import notebook_text

TOML = 'number = 7\nname = "sums"\ntitle = "Sums"\ncore = true\nminutes = 10\n'

TEXT = """\
# %% [markdown] id="why"
# # Why

# %% nbgrader={"grade_id": "add", "solution": true}
def add(a, b):
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_add", "grade": true, "points": 2}
lab.check("add")
"""

ANSWER = "def add(a, b):\n    return b + a"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LabInfo:
    source = tmp_path / "solutions" / "07_sums"
    source.mkdir(parents=True)
    (tmp_path / "labs").mkdir()
    (source / "lab.toml").write_text(TOML)
    (source / "07_sums.py").write_text(TEXT)
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    return source_labs()[0]


@pytest.fixture
def submission(lab: LabInfo, tmp_path: Path) -> dict[str, Any]:
    read = json.loads(notebook_text(release_notebook(tmp_path / "solutions" / lab.directory)))
    read["cells"][1]["source"] = ANSWER
    return read


def sources(lab: LabInfo, submission: object) -> list[str]:
    return [cell.source for cell in rebuild(lab, io.StringIO(json.dumps(submission))).cells]


def test_the_answer_stands_between_the_cells_of_the_release(lab: LabInfo, submission: dict[str, Any]) -> None:
    assert sources(lab, submission) == ["# Why", ANSWER, 'lab.check("add")']


def test_the_students_own_cells_stay_where_they_put_them(lab: LabInfo, submission: dict[str, Any]) -> None:
    submission["cells"].insert(2, {"cell_type": "code", "source": "add(1, 2)", "metadata": {}})
    submission["cells"].insert(0, {"cell_type": "markdown", "source": ["My ", "notes"], "metadata": {}})
    assert sources(lab, submission) == ["My notes", "# Why", ANSWER, "add(1, 2)", 'lab.check("add")']


def edit_test_cell(cells: list) -> None:
    cells[2]["source"] = "2.0"
    cells[2]["metadata"]["nbgrader"] |= {"points": 1000, "grade": False}


def delete_test_cell(cells: list) -> None:
    del cells[2]


def paste_test_cell_twice(cells: list) -> None:
    cells += [cells[2], cells[2]]


def paste_answer_twice(cells: list) -> None:
    cells.append(cells[1] | {"source": "raise"})


def empty_metadata(cells: list) -> None:
    for cell in cells:
        cell["metadata"] = {"nbgrader": {}}


def another_schema(cells: list) -> None:
    for cell in cells[1:]:
        cell["metadata"]["nbgrader"]["schema_version"] = 99


def forged_outputs(cells: list) -> None:
    cells[2]["outputs"] = [{"output_type": "execute_result", "data": {"text/plain": "2.0"}, "metadata": {}, "execution_count": 1}]


@pytest.mark.parametrize(
    "tamper",
    [edit_test_cell, delete_test_cell, paste_test_cell_twice, paste_answer_twice, empty_metadata, another_schema, forged_outputs],
    ids=lambda tamper: tamper.__name__,
)
def test_what_is_not_an_answer_comes_from_the_source(lab: LabInfo, submission: dict[str, Any], tamper: Callable[[list], None]) -> None:
    honest = rebuild(lab, io.StringIO(json.dumps(submission)))
    tamper(submission["cells"])
    assert rebuild(lab, io.StringIO(json.dumps(submission))) == honest


@pytest.mark.parametrize(
    "file",
    ["", "{", "[]", "null", "{}", '{"cells": 5}', '{"cells": [1, {}, {"source": 7}, {"metadata": []}]}', "[" * 100_000, "\x00\x01"],
    ids=range(9),
)
def test_any_file_gives_a_notebook_that_can_be_graded(lab: LabInfo, file: str, tmp_path: Path) -> None:
    untouched = release_notebook(tmp_path / "solutions" / lab.directory)
    assert rebuild(lab, io.StringIO(file)) == untouched


def test_a_cell_of_endless_text_is_cut(lab: LabInfo, submission: dict[str, Any]) -> None:
    submission["cells"][1]["source"] = "#" * 10 * MOST_CHARACTERS
    assert len(sources(lab, submission)[1]) == MOST_CHARACTERS
