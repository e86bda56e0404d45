"""The course on disk: labs are found by any of their names, and a lab.toml that is wrong
says what to put right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dlo_lib
from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.course import checkout_of, course_root, find_lab, labs, read_lab_info, source_labs

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
        (folder / f"{name}.ipynb").write_text("{}")
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    return tmp_path


def test_labs_come_in_the_order_of_their_numbers(course: Path) -> None:
    assert [lab.directory for lab in labs()] == ["02_mixed_precision", "13_dp_limit", "14_zero"]


def test_a_lab_without_a_notebook_is_known_to_its_author_only(course: Path) -> None:
    (course / "solutions" / "14_zero").mkdir(parents=True)
    (course / "labs" / "14_zero" / "zero.ipynb").unlink()
    assert [lab.directory for lab in labs()] == ["02_mixed_precision", "13_dp_limit"]
    assert [lab.directory for lab in source_labs()] == ["14_zero"]


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


@pytest.fixture
def standing(course: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a course, linked to its checkout as by `dlo course`; the process is in it."""
    folder = course / "class"
    (course / "solutions").mkdir()
    folder.mkdir(mode=0o700)
    (folder / "solutions").symlink_to(course / "solutions")
    (folder / "nbgrader_config.py").touch()
    monkeypatch.delenv("DLO_COURSE")
    monkeypatch.chdir(folder)
    return folder


def test_a_course_is_found_by_its_folder(standing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert course_root() == standing.parent
    assert find_lab("13").directory == "13_dp_limit"
    monkeypatch.setenv("DLO_COURSE", str(Path(dlo_lib.__file__).parents[1]))
    assert course_root() == Path(dlo_lib.__file__).parents[1]


def test_a_folder_without_a_link_to_a_checkout_is_no_course(standing: Path) -> None:
    own = Path(dlo_lib.__file__).parents[1]
    (standing.parent / "solutions").rmdir()
    assert course_root() == own  # the checkout has moved, and `dlo course` links the new one
    (standing / "solutions").unlink()
    assert course_root() == own


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a folder of another user (needs root)")
def test_the_folder_of_a_stranger_is_no_course(standing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of its checkout would run."""
    os.chown(standing, 65534, 65534)
    assert checkout_of(standing) is None
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert checkout_of(standing) == standing.parent
    os.chown(standing, 0, 0)
    assert checkout_of(standing) == standing.parent


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
