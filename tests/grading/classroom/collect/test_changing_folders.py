"""A student changes the folder of a submission while the instructor collects it, or fills it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dlo_lib.grading.classroom.collect.arrivals import Incoming, from_exchange
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.roster.safe_files import Refused
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.sandbox.limits import limit_growth

LAB = "91_small"
FOLDER = f"ada+{LAB}+2026-11-20 11:00:00 UTC+nonce"
OTHERS = b"the work of another student"


@pytest.fixture
def mine(course: Path) -> Path:
    """Ada's submission in the exchange: a notebook, and a file in a folder."""
    folder = course.parent / "exchange" / "dlo" / "inbound" / FOLDER
    (folder / "data").mkdir(parents=True)
    (folder / "small.ipynb").write_bytes(b"{}")
    (folder / "data" / "small.ipynb").write_bytes(b"{}")
    return folder


@pytest.fixture
def theirs(course: Path) -> Path:
    """A folder that only the instructor can read, with files of the same names."""
    folder = course / "submitted" / "blaise" / LAB
    (folder / "data").mkdir(parents=True)
    for file in ("small.ipynb", "data/small.ipynb"):
        (folder / file).write_bytes(OTHERS)
    return folder


@pytest.fixture
def arrived(course: Path) -> Callable[[], Incoming]:
    """The submission as the collection finds it; its files are not read yet."""

    def find() -> Incoming:
        (found,) = from_exchange(open_course(course), find_lab(LAB, source_labs()))
        return found

    return find


def swapped(place: Path, target: Path) -> None:
    place.rename(place.with_name("aside"))
    place.symlink_to(target)


@pytest.mark.parametrize("part", ["", "data", "data/small.ipynb", "small.ipynb"])
def test_a_part_swapped_for_a_link_brings_nothing_of_another_student(
    mine: Path, theirs: Path, arrived: Callable[[], Incoming], part: str
) -> None:
    submission = arrived()
    assert submission.refused == ""
    swapped(mine / part if part else mine, theirs / part)
    with pytest.raises(Refused, match="cannot be read"):
        submission.files()


def test_a_folder_or_a_file_swapped_for_another_one_is_refused(
    mine: Path, theirs: Path, arrived: Callable[[], Incoming]
) -> None:
    """A mount or a rename brings another folder without a link."""
    submission = arrived()
    (mine / "small.ipynb").unlink()
    shutil.copyfile(theirs / "small.ipynb", mine / "small.ipynb")
    with pytest.raises(Refused, match=r"small\.ipynb changed while it was collected: collect again"):
        submission.files()
    submission = arrived()
    mine.rename(mine.with_name("aside"))
    shutil.copytree(theirs, mine)
    with pytest.raises(Refused, match="changed while it was collected"):
        submission.files()


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: files of several users (needs root)")
@pytest.mark.parametrize("foreign", ["small.ipynb", "data", "data/small.ipynb"])
def test_a_file_of_another_user_is_not_a_students_work(
    mine: Path, arrived: Callable[[], Incoming], foreign: str
) -> None:
    """A hard link brings the file of another user, with its owner."""
    os.chown(mine / foreign, 54321, -1)
    with pytest.raises(Refused, match="belongs to another user than the folder of the submission"):
        arrived().files()


def test_students_cannot_rename_the_submissions_of_others(
    mine: Path, course: Path, released_course: Path, arrived: Callable[[], Incoming]
) -> None:
    inbound, exchange = mine.parent, course.parent / "exchange"
    inbound.chmod(0o733)  # as nbgrader creates them
    exchange.chmod(0o777)
    arrived()
    for folder in (inbound, exchange, *(released_course / "exchange" / name for name in ("", "dlo/inbound"))):
        assert stat.S_IMODE(folder.stat().st_mode) & stat.S_ISVTX, folder


def test_a_folder_that_another_user_wrote_is_not_walked(
    mine: Path, course: Path, arrived: Callable[[], Incoming]
) -> None:
    with open(course / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write("c.ExchangeCollect.check_owner = True\n")
    submission = arrived()
    assert "written by" in submission.refused
    assert submission.entries == ()


def test_sparse_notebooks_take_no_memory(mine: Path, arrived: Callable[[], Incoming]) -> None:
    for number in range(30):
        (mine / f"{number}.ipynb").touch()
        os.truncate(mine / f"{number}.ipynb", 99 << 20)
    submission = arrived()
    with limit_growth(300 << 20), pytest.raises(Refused, match="is larger than"):
        submission.files()


def test_the_files_of_all_submissions_of_a_student_are_counted(
    mine: Path, course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every submission is walked before the newest one is chosen."""
    monkeypatch.setattr("dlo_lib.grading.classroom.collect.arrivals.MOST_OF_A_STUDENT", 5)
    for number in range(4):
        shutil.copytree(mine, mine.with_name(f"ada+{LAB}+2026-11-21 11:00:0{number} UTC+nonce"))
    found = from_exchange(open_course(course), find_lab(LAB, source_labs()))
    assert sum(len(submission.entries) for submission in found) <= 5
    assert [submission.refused for submission in found][-1].startswith("more than")


def test_a_zip_with_an_endless_list_of_files_is_not_read(mine: Path, arrived: Callable[[], Incoming]) -> None:
    import zipfile

    shutil.rmtree(mine / "data")
    (mine / "small.ipynb").unlink()
    with zipfile.ZipFile(mine / "work.zip", "w") as archive:
        archive.writestr("small.ipynb", "{}")
        for number in range(20_000):
            archive.writestr(f"{number}.txt", b"")
    assert list(arrived().files()) == ["work.zip"]
