"""Checks can be read: lines of 110 columns, functions of 60 lines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dlo_lib.grading.lab.course import LabInfo, given_folder, source_folder, source_labs
from dlo_lib.grading.lab.source import read_lab
from dlo_lib.grading.lab.text_rules import check_faults


@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_each_lab_can_be_read(lab: LabInfo) -> None:
    assert check_faults(read_lab(source_folder(lab))) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("# " + 109 * "x", "has 111 columns: wrap it at 110"),
        ("def long():\n" + 60 * "    a = 1\n", "long has 61 lines"),
    ],
)
def test_a_wide_line_and_a_long_function_are_refused(tmp_path: Path, line: str, words: str) -> None:
    shutil.copytree(Path(__file__).parents[1] / "small_course", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "solutions" / "91_small"
    assert check_faults(read_lab(folder)) == []
    checks = next((given_folder(folder) / "checks").glob("*.py"))
    checks.write_text(checks.read_text() + "\n\n" + line + "\n")
    (fault,) = check_faults(read_lab(folder))
    assert words in fault
