"""The graded notebook is the release with the student's answers; nothing else of the file has an effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nbformat import NotebookNode

from dlo_lib.grading.judge.rebuilt_notebook import MOST_CHARACTERS, rebuild_file
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab
from tests.grading.two_folders import write_lab

TOML = 'number = 7\nname = "sums"\ntitle = "Sums"\ncore = true\nminutes = 10\n'

TEXT = """\
# %% [markdown] id="why"
# # Why

# %% nbgrader={"grade_id": "add", "solution": true}
def add(a, b):
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_add", "grade": true}
lab.check("add")
"""

ANSWER = "def add(a, b):\n    return b + a"


@pytest.fixture
def lab(tmp_path: Path) -> LabSource:
    checks = '@check("add", points=2)\ndef check_add(student, t): ...\n'
    files = {"lab.toml": TOML, "07_sums.py": TEXT, "checks/sums.py": checks, "hidden.py": ""}
    return read_lab(write_lab(tmp_path, "07_sums", files))


@pytest.fixture
def submission(lab: LabSource) -> dict[str, Any]:
    read = json.loads(notebook_text(release_notebook(lab.folder)))
    read["cells"][1]["source"] = ANSWER
    return read


def rebuilt(lab: LabSource, submission: object) -> NotebookNode:
    file = lab.folder / "handed_in.ipynb"
    file.write_text(json.dumps(submission))
    return rebuild_file(lab, file)


def sources(lab: LabSource, submission: object) -> list[str]:
    return [cell.source for cell in rebuilt(lab, submission).cells]


def test_answers_are_between_the_cells_of_the_release(lab: LabSource, submission: dict[str, Any]) -> None:
    assert sources(lab, submission) == ["# Why", ANSWER, 'lab.check("add")']


def test_added_cells_keep_their_places(lab: LabSource, submission: dict[str, Any]) -> None:
    submission["cells"].insert(2, {"cell_type": "code", "source": "add(1, 2)", "metadata": {}})
    submission["cells"].insert(0, {"cell_type": "code", "source": ["import ", "math"], "metadata": {}})
    assert sources(lab, submission) == ["import math", "# Why", ANSWER, "add(1, 2)", 'lab.check("add")']


def test_an_answer_pasted_twice_is_shown_as_the_judge_ran_it(
    lab: LabSource,
    submission: dict[str, Any],
) -> None:
    submission["cells"].append(submission["cells"][1] | {"source": "second = 2"})
    assert sources(lab, submission)[1] == f"{ANSWER}\n\nsecond = 2"


def edit_test_cell(cells: list) -> None:
    cells[2]["source"] = "2.0"
    cells[2]["metadata"]["nbgrader"] |= {"points": 1000, "grade": False}


def delete_test_cell(cells: list) -> None:
    del cells[2]


def paste_test_cell_twice(cells: list) -> None:
    cells += [cells[2], cells[2]]


def empty_metadata(cells: list) -> None:
    for cell in cells:
        cell["metadata"] = {"nbgrader": {}}


def another_schema(cells: list) -> None:
    for cell in cells[1:]:
        cell["metadata"]["nbgrader"]["schema_version"] = 99


def forged_outputs(cells: list) -> None:
    cells[2]["outputs"] = [
        {"output_type": "execute_result", "data": {"text/plain": "2.0"}, "metadata": {}, "execution_count": 1}
    ]


@pytest.mark.parametrize(
    "tamper",
    [edit_test_cell, delete_test_cell, paste_test_cell_twice, empty_metadata, another_schema, forged_outputs],
    ids=lambda tamper: tamper.__name__,
)
def test_everything_except_answers_comes_from_the_source(
    lab: LabSource, submission: dict[str, Any], tamper: Callable[[list], None]
) -> None:
    honest = rebuilt(lab, submission)
    tamper(submission["cells"])
    assert rebuilt(lab, submission) == honest


@pytest.mark.parametrize(
    "file",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"cells": 5}',
        '{"cells": [1, {}, {"source": 7}, {"metadata": []}]}',
        "[" * 100_000,
        "\x00\x01",
    ],
    ids=range(9),
)
def test_any_file_gives_a_notebook_that_can_be_graded(lab: LabSource, file: str) -> None:
    (lab.folder / "handed_in.ipynb").write_text(file)
    assert rebuild_file(lab, lab.folder / "handed_in.ipynb") == release_notebook(lab.folder)


def test_a_cell_with_very_long_text_is_cut(lab: LabSource, submission: dict[str, Any]) -> None:
    submission["cells"][1]["source"] = "#" * 10 * MOST_CHARACTERS
    assert len(sources(lab, submission)[1]) == MOST_CHARACTERS
