"""Checks can be read: lines of 110 columns, functions of 60 lines. The labs that are not rewritten yet are in
one list, which can only shrink."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from dlo_lib.grading.lab.course import given_folder, source_folder, source_labs
from dlo_lib.grading.lab.source import read_lab
from dlo_lib.grading.lab.text_rules import check_faults, check_lines, old_checks

LABS = {lab.directory: lab for lab in source_labs()}


def test_the_list_has_no_lab_that_does_not_exist() -> None:
    assert set(old_checks()) <= set(LABS)


def test_each_old_lab_has_the_numbers_of_the_list() -> None:
    """Where a lab has fewer: lower the numbers in old_checks.toml. A lab without faults leaves the list."""
    for directory, numbers in old_checks().items():
        wide, long = check_lines(read_lab(source_folder(LABS[directory])))
        assert (directory, len(wide), len(long)) == (directory, *numbers)
        assert numbers != (0, 0), directory


def test_ruff_leaves_out_the_labs_with_wide_lines_and_no_other() -> None:
    settings = tomllib.loads(Path("labs/ruff.toml").read_text())
    wide = [f"{name}/**" for name, (lines, _) in old_checks().items() if lines]
    assert settings["format"]["exclude"] == wide
    assert list(settings["lint"]["extend-per-file-ignores"]) == wide


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
