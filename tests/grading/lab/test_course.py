"""The course on disk: labs are found by any of their names, and a lab.toml that is wrong
says what to put right."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.errors import UserError
from dlo_lib.grading.lab.course import course_root, find_lab, labs, read_lab_info

TOML = """
number = {number}
name = "{name}"
title = "Lab {number}"
core = true
minutes = 60
"""


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number, name in ((13, "dp_limit"), (2, "mixed_precision"), (14, "zero")):
        folder = tmp_path / "labs" / f"{number:02d}_{name}"
        folder.mkdir(parents=True)
        (folder / "lab.toml").write_text(TOML.format(number=number, name=name))
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    return tmp_path


def test_labs_come_in_the_order_of_their_numbers(course: Path) -> None:
    assert [lab.directory for lab in labs()] == ["02_mixed_precision", "13_dp_limit", "14_zero"]


@pytest.mark.parametrize("name", ["13_dp_limit", "13", "dp_limit", "DP_LIMIT"])
def test_a_lab_is_found_by_directory_number_or_name(course: Path, name: str) -> None:
    lab = find_lab(name)
    assert (lab.directory, lab.notebook, lab.minutes) == ("13_dp_limit", "dp_limit.ipynb", 60)


@pytest.mark.parametrize(
    ("name", "near"), [("dp_limti", "dp_limit"), ("13_dplimit", "13_dp_limit"), ("zeros", "zero")]
)
def test_an_unknown_lab_offers_the_nearest(course: Path, name: str, near: str) -> None:
    with pytest.raises(UserError, match=f'unknown lab "{name}": did you mean {near}'):
        find_lab(name)


def test_without_labs_the_error_names_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    with pytest.raises(UserError, match="set DLO_COURSE"):
        course_root()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("minutes = 60", "", "minutes is missing"),
        ("minutes = 60", 'minutes = "60"', "minutes must be of type int"),
        ("minutes = 60", "minutes = true", "minutes must be of type int"),
        ("minutes = 60", "minuts = 60\nminutes = 60", "unknown key minuts"),
        ("minutes = 60", "minutes = ", "not valid TOML"),
        ("number = 13", "number = 12", "number and name say 12_dp_limit, its folder 13_dp_limit"),
        ("core = true", "core = true\ntaught = [1]", "taught must be a list of strings"),
    ],
)
def test_a_wrong_lab_toml_says_what_to_put_right(course: Path, old: str, new: str, message: str) -> None:
    file = course / "labs" / "13_dp_limit" / "lab.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        labs()


def test_a_folder_without_lab_toml_is_not_a_lab(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no lab\.toml in"):
        read_lab_info(tmp_path)


def test_a_students_copy_may_lie_in_a_folder_of_any_name(course: Path) -> None:
    (course / "labs" / "13_dp_limit").rename(course / "my lab")
    assert read_lab_info(course / "my lab").directory == "13_dp_limit"
