"""References are the solution cells of a lab: encoded in its release, and run without
a student's functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.course import REFERENCES_FILE as FILE
from dlo_lib.grading.lab.course import source_labs
from dlo_lib.grading.lab.references import references, references_text
from dlo_lib.grading.lab.source import CellKind, LabSource, read_lab
from dlo_lib.grading.notebook.reference import use_reference
from tests.grading.two_folders import write_lab

TOML = """
number = 7
name = "sums"
title = "Sums"
core = true
minutes = 10

[steps.double]
needs = ["add"]

[steps.quadruple]
needs = ["double"]
"""
CELLS = {
    "add": "def add(a, b):\n    {}\n    return a + b + ZERO",
    "double": "def double(a):\n    {}\n    return add(a, a)",
    "quadruple": "def quadruple(a):\n    {}\n    return double(double(a))",
    "alone": "def alone(a):\n    {}\n    return a",
    "value": "{}\nVALUE = 3",
}


def cell(question: str, code: str) -> str:
    body = code.replace("{}\n", "### BEGIN SOLUTION\n", 1) + "\n### END SOLUTION"
    body = body.replace("    ### BEGIN", "    ### BEGIN").replace(
        "\n### END", "\n    ### END" if "def" in code else "\n### END"
    )
    header = f'# %% nbgrader={{"grade_id": "{question}", "solution": true}}'
    return (
        f'{header}\n{body}\n\n# %% nbgrader={{"grade_id": "test_{question}", "grade": true}}\n'
        f'lab.check("{question}")\n\n'
    )


@pytest.fixture
def lab(tmp_path: Path) -> LabSource:
    text = '# %% id="given"\nZERO = 0\n\n' + "".join(cell(question, code) for question, code in CELLS.items())
    checks = "".join(f'@check("{q}", points=1)\ndef check_{q}(student, t): ...\n\n\n' for q in CELLS)
    files = {
        "lab.toml": TOML,
        "07_sums.py": text + '# %% id="show" tags=["demo"]\nprint(quadruple(VALUE))\n',
        "checks/sums.py": checks,
        "hidden.py": "",
    }
    source = read_lab(write_lab(tmp_path, "07_sums", files))
    (source.given / FILE).write_text(references_text(source))
    return source


def test_a_question_has_one_if_a_later_cell_uses_its_functions(lab: LabSource) -> None:
    assert list(references(lab)) == ["add", "double", "quadruple"]


def test_the_release_shows_no_answer(lab: LabSource) -> None:
    assert "return" not in references_text(lab)
    assert references_text(lab) == references_text(lab)


def test_a_reference_calls_those_that_it_needs_and_not_the_students(lab: LabSource) -> None:
    namespace: dict[str, Any] = {"ZERO": 0, "add": lambda a, b: -1, "double": lambda a: -1}
    found = use_reference(lab.given, "quadruple", namespace)
    assert found.keys() == {"quadruple"}
    assert found["quadruple"](3) == 12
    assert namespace["add"](1, 1) == -1


def test_what_cannot_be_used_says_why(lab: LabSource) -> None:
    with pytest.raises(UserError, match="alone has no reference: no later step uses it"):
        use_reference(lab.given, "alone", {})
    (lab.given / FILE).write_text(json.dumps({"add": "%"}))
    with pytest.raises(UserError, match="is damaged: `dlo lab` restores it"):
        use_reference(lab.given, "add", {})
    (lab.given / FILE).unlink()
    with pytest.raises(UserError, match="this course is released without references"):
        use_reference(lab.given, "add", {})


@pytest.mark.parametrize("info", source_labs(), ids=lambda info: info.directory)
def test_the_steps_of_each_lab_that_others_need_have_one(info: Any) -> None:
    lab = read_lab(Path(__file__).parents[3] / "solutions" / info.directory)
    found = references(lab)
    assert {step for steps in info.needs.values() for step in steps} <= found.keys()
    assert (
        found.items()
        <= {cell.id: cell.answer for cell in lab.cells if cell.kind is CellKind.SOLUTION}.items()
    )
