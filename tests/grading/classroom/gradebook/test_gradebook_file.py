"""A lost, damaged or locked gradebook is named with its backup, and no row is lost."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook import gradebook_file
from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.gradebook_file import back_up, patient_url
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.judge.client import JudgeClient
from dlo_lib.grading.lab.course import find_lab, source_labs
from tests.grading.small_class import graded_files, hand_in, rows, small_lab, wrong_scale

ADA = Options(only="ada", unsafe=True)


@pytest.fixture
def course(ungraded: Path, graded_class: Path, tmp_path: Path) -> Path:
    shutil.copytree(graded_class, tmp_path / "graded", symlinks=True)
    return tmp_path / "graded"


def empty(file: Path) -> None:
    file.write_bytes(b"")


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    file.write_bytes(content)


def no_database(file: Path) -> None:
    file.write_bytes(b"text, not a database" * 300)


def another_database(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as other:
        other.execute("create table recipes (name)")


def without_students(file: Path) -> None:
    """As nbgrader leaves an empty file that it has opened."""
    with sqlite3.connect(file) as gradebook:
        gradebook.execute("delete from student")


def killed_while_writing(file: Path) -> None:
    """As a program leaves the gradebook that was killed while it wrote: half a change, and the journal that
    undoes it."""
    journal = Path(f"{file}-journal")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("pragma cache_size = 1")  # pages are written before the change is complete
        writer.execute("begin immediate")
        writer.execute("create table half as with recursive n(x) as (select 1 union all select x + 1 from n "
                       "limit 2000) select x, hex(randomblob(200)) from n")  # fmt: skip
        writer.execute("update student set first_name = 'half'")
        at_that_time = {path: path.read_bytes() for path in (file, journal)}
    for path, content in at_that_time.items():
        path.write_bytes(content)


def test_a_gradebook_whose_writer_was_killed_is_whole(course: Path) -> None:
    file, whole = course / "gradebook.db", rows(course / "gradebook.db")
    killed_while_writing(file)
    assert Path(f"{file}-journal").stat().st_size
    back_up(open_course(course))
    assert rows(file) == whole


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (Path.unlink, "is missing"),
        (empty, "is empty"),
        (damaged, "is damaged"),
        (no_database, "is damaged"),
        (another_database, "has no tables of nbgrader"),
        (without_students, "has no students, although its newest backup has 5"),
    ],
)
def test_a_lost_gradebook_is_named_with_its_backup(course: Path, break_it, fault: str) -> None:
    file, whole = course / "gradebook.db", rows(course / "gradebook.db")
    backup = back_up(open_course(course))
    break_it(file)
    broken = file.read_bytes() if file.exists() else None
    with pytest.raises(UserError, match=f"{fault}.*: restore its newest backup: cp {backup} {file}"):
        open_course(course)
    assert (file.read_bytes() if file.exists() else None) == broken
    shutil.copyfile(str(backup), file)
    open_course(course)
    assert rows(file) == whole


def test_without_a_backup_the_message_names_the_way_to_an_empty_one(course: Path) -> None:
    shutil.rmtree(course / gradebook_file.BACKUPS, ignore_errors=True)
    empty(course / "gradebook.db")
    with pytest.raises(UserError, match="it has no backup; to begin with an empty one, remove it and run"):
        open_course(course)


def test_backups_are_numbered_and_equal_ones_are_not_repeated(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(course / gradebook_file.BACKUPS, ignore_errors=True)
    monkeypatch.setattr(gradebook_file, "MOST_BACKUPS", 2)
    opened = open_course(course)
    assert back_up(opened) == back_up(opened)
    for name in ("x1", "x2", "x3"):
        with opened.gradebook as gradebook:
            gradebook.add_student(name)
        back_up(opened)
    names = [path.name for path in sorted((course / gradebook_file.BACKUPS).iterdir())]
    assert names == ["gradebook-0003.db", "gradebook-0004.db"]


def test_a_batch_backs_up_before_it_writes(course: Path, judges: JudgeClient) -> None:
    before = rows(course / "gradebook.db")
    shutil.rmtree(course / gradebook_file.BACKUPS, ignore_errors=True)
    grade_lab(find_lab("91", source_labs()), course, options=ADA, judges=judges)
    assert rows(course / gradebook_file.BACKUPS / "gradebook-0001.db") == before


def test_a_gradebook_that_is_locked_for_a_while_is_waited_for(course: Path, judges: JudgeClient) -> None:
    """The batch asks for the lock while another program holds it, and gets it when that program is done."""
    hand_in(course, "ada", json.dumps(wrong_scale(small_lab())))  # without a change nothing is written
    other = sqlite3.connect(course / "gradebook.db", check_same_thread=False)
    other.execute("begin immediate")
    timer = threading.Timer(8.0, other.rollback)  # longer than SQLite's own 5 s
    timer.start()
    try:
        table = grade_lab(find_lab("91", source_labs()), course, options=ADA, judges=judges)
    finally:
        timer.join()
        other.close()
    assert {row.student: row.total for row in table.rows}["ada"] < 12


def test_a_gradebook_that_stays_locked_costs_no_row_and_no_notebook(
    course: Path, judges: JudgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradebook_file, "LOCK_SECONDS", 0.2)
    hand_in(course, "ada", json.dumps(wrong_scale(small_lab())))
    before, notebooks = rows(course / "gradebook.db"), graded_files(course)
    other = sqlite3.connect(course / "gradebook.db")
    other.execute("begin immediate")
    try:
        with pytest.raises(UserError, match="another program has held the gradebook .*--resume"):
            grade_lab(find_lab("91", source_labs()), course, options=ADA, judges=judges)
    finally:
        other.rollback()
        other.close()
    assert rows(course / "gradebook.db") == before
    assert graded_files(course) == notebooks


def test_another_database_than_sqlite_is_left_alone() -> None:
    url = "postgresql://grader:secret@db.example/course"
    assert patient_url(url) == url
    assert patient_url("sqlite:////c/gradebook.db") == "sqlite:////c/gradebook.db?timeout=60.0"
