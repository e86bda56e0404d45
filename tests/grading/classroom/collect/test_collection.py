"""Collect submissions: the newest of each student counts, others are kept or named, and archives are not
trusted.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import stat
import struct
import threading
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dlo_lib.base import files
from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.collect import collection
from dlo_lib.grading.classroom.collect.collection import collect
from dlo_lib.grading.classroom.collect.receipt import receipt_of
from dlo_lib.grading.classroom.gradebook.export import read_grades
from dlo_lib.grading.classroom.gradebook.inventory import Inventory, Item, ItemState
from dlo_lib.grading.classroom.gradebook.moodle import has_no_points
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.judge.grader_lock import only_grader
from dlo_lib.grading.lab.course import find_lab, source_labs

LAB = "91_small"
MOODLE = "Chloé Dupont_1234_assignsubmission_file_small.ipynb"


def notebook(answer: str = "a") -> bytes:
    """Return a notebook with the id of its lab."""
    cell: dict[str, Any] = {
        "cell_type": "code",
        "id": "scale",
        "metadata": {},
        "source": answer,
        "outputs": [],
        "execution_count": None,
    }
    return json.dumps(
        {"cells": [cell], "metadata": {"dlo": {"lab": LAB}}, "nbformat": 4, "nbformat_minor": 5}
    ).encode()


@pytest.fixture
def take(course: Path) -> Callable[..., Inventory]:
    """Collect the small lab as `dlo collect` does, from the exchange or from ``source``."""

    def run(source: Path | None = None) -> Inventory:
        return collect(open_course(course), find_lab(LAB, source_labs()), source)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[Mapping[str, bytes]], Path]:
    """Write a folder of submissions."""

    def make(files: Mapping[str, bytes]) -> Path:
        for name, content in files.items():
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_bytes(content)
        return tmp_path / "in"

    return make


@pytest.fixture
def zipped(tmp_path: Path) -> Callable[..., Path]:
    """Write a zip of submissions; ``settings`` apply to all members."""

    def make(files: Mapping[str, bytes], **settings: int) -> Path:
        with zipfile.ZipFile(tmp_path / "moodle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                info = zipfile.ZipInfo(name, (2026, 11, 20, 10, 30, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                for key, value in settings.items():
                    setattr(info, key, value)
                archive.writestr(info, content)
        return tmp_path / "moodle.zip"

    return make


def states(inventory: Inventory) -> dict[str, ItemState]:
    return {item.student: item.state for item in inventory.items if item.state is not ItemState.MISSING}


def line(inventory: Inventory, student: str) -> Item:
    (item,) = [item for item in inventory.items if item.student == student]
    return item


def everything(course: Path) -> dict[str, bytes]:
    kept = [
        path for top in ("submitted", "collected") for path in (course / top).rglob("*") if path.is_file()
    ]
    return {path.relative_to(course).as_posix(): path.read_bytes() for path in kept}


# -- received and missing submissions


def test_every_student_of_the_roster_has_a_line(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
    course: Path,
) -> None:
    source = folder(
        {
            "ada/91_small/small.ipynb": notebook("ada"),
            "ada/92_sharded/sharded.ipynb": b"another lab",
            "Blaise.ipynb": notebook("blaise"),
            "chloe/work/Copy of small (1).ipynb": notebook("chloe"),
            "chloe/.DS_Store": b"x",
            "zoe/small.ipynb": notebook("zoe"),
        }
    )
    inventory = take(source)
    assert [item.student for item in inventory.items] == ["ada", "blaise", "chloe", "dan", "dan2", "zoe"]
    assert states(inventory) == {
        "ada": ItemState.NEW,
        "blaise": ItemState.NEW,
        "chloe": ItemState.NEW,
        "zoe": ItemState.UNKNOWN,
    }
    assert [item.student for item in inventory.items if item.renamed] == ["chloe"]
    (stranger,) = inventory.of(ItemState.UNKNOWN)
    assert (
        "no student of the roster has this id; kept in collected/91_small/unknown/zoe-" in stranger.notes[0]
    )
    names = {name for name in everything(course) if not name.startswith("collected")}
    assert names == {
        "submitted/ada/91_small/small.ipynb", "submitted/blaise/91_small/small.ipynb",
        "submitted/chloe/91_small/Copy of small (1).ipynb",
    }  # fmt: skip
    assert notebook("zoe") in everything(course).values()


def test_the_receipt_is_the_sha256_of_the_students_file(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
    course: Path,
) -> None:
    source = folder({"ada/small.ipynb": notebook("ada")})
    sha256 = hashlib.sha256(notebook("ada")).hexdigest()
    assert line(take(source), "ada").sha256 == sha256 == receipt_of(source / "ada" / "small.ipynb")
    (shown,) = csv.DictReader(io.StringIO((course / "grades" / LAB / "receipts.csv").read_text()))
    assert (shown["student"], shown["sha256"]) == ("ada", sha256)


def test_a_receipt_of_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no receipt for .*: none.ipynb cannot be read"):
        receipt_of(tmp_path / "none.ipynb")


def test_a_submission_without_a_notebook_lists_its_files(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
) -> None:
    item = line(take(folder({"ada/work.zip": b"PK", "ada/small.ipynb": b"{"})), "ada")
    assert (item.state, item.sha256) == (ItemState.NEW, "")
    assert "damaged" in item.notes[0]
    assert "there are: small.ipynb, work.zip" in item.notes[0]


def packed(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def test_a_notebook_in_a_students_zip_is_extracted(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
    course: Path,
) -> None:
    content = packed(
        {"my work/small.ipynb": notebook(), "__MACOSX/my work/._small.ipynb": b"x", "my work/notes.txt": b"x"}
    )
    item = line(take(folder({"ada/My Work.ZIP": content})), "ada")
    assert (item.notebook, item.sha256) == ("small.ipynb", hashlib.sha256(notebook()).hexdigest())
    assert {Path(name).name for name in everything(course)} == {"small.ipynb", "My Work.ZIP"}


@pytest.mark.parametrize(
    "files",
    [
        {"../../small.ipynb": b"{}"},
        {"/small.ipynb": b"{}"},
        {"a.ipynb": b"{}", "b.ipynb": b"{}"},
        {f"{'x' * 300}.ipynb": b"{}"},
        {"inner.zip": packed({"small.ipynb": b"{}"})},
    ],
    ids=["out of it", "absolute", "two", "long name", "zip in zip"],
)
def test_a_zip_without_exactly_one_notebook_is_not_extracted(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path, files: dict[str, bytes]
) -> None:
    item = line(take(folder({"ada/work.zip": packed(files)})), "ada")
    assert (item.state, item.sha256) == (ItemState.NEW, "")
    assert item.notes == ("there is no notebook small.ipynb in the submission; there are: work.zip",)
    assert set(everything(course)) == {f"submitted/ada/{LAB}/work.zip"}


def test_collecting_again_changes_nothing(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path
) -> None:
    source = folder({"ada/small.ipynb": notebook(), "zoe/small.ipynb": notebook()})
    take(source)
    before, tables = everything(course), (course / "grades" / LAB / "receipts.csv").read_bytes()
    assert states(take(source)) == {"ada": ItemState.UNCHANGED, "zoe": ItemState.UNKNOWN}
    assert everything(course) == before
    assert (course / "grades" / LAB / "receipts.csv").read_bytes() == tables


def test_a_replaced_submission_is_kept_and_named(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
    course: Path,
) -> None:
    for answer in ("first", "second", "third"):
        item = line(take(folder({"ada/small.ipynb": notebook(answer)})), "ada")
    assert item.state is ItemState.REPLACED
    assert item.notes == ("the earlier one is in collected/91_small/replaced/ada/002",)
    assert (course / "submitted" / "ada" / LAB / "small.ipynb").read_bytes() == notebook("third")
    kept = [
        everything(course)[f"collected/{LAB}/replaced/ada/{number}/small.ipynb"] for number in ("001", "002")
    ]
    assert kept == [notebook("first"), notebook("second")]


def test_an_older_submission_replaces_nothing(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
    course: Path,
) -> None:
    take(folder({"ada/small.ipynb": notebook("new"), "ada/timestamp.txt": b"2026-11-20 12:00:00 UTC"}))
    item = line(
        take(folder({"ada/small.ipynb": notebook("old"), "ada/timestamp.txt": b"2026-11-19 12:00:00 UTC"})),
        "ada",
    )
    assert item.state is ItemState.KEPT
    assert "older than what was received before" in item.notes[0]
    assert (course / "submitted" / "ada" / LAB / "small.ipynb").read_bytes() == notebook("new")


def test_lateness_is_counted_from_the_due_date(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path
) -> None:
    with open_course(course).gradebook as gradebook:
        gradebook.update_or_create_assignment(LAB, duedate="2026-11-20 12:00:00 UTC")
    files = {
        "ada/timestamp.txt": b"2026-11-20 14:00:00.5 CET",
        "blaise/timestamp.txt": b"2026-11-20 14:00:00 UTC",
    }
    inventory = take(
        folder(
            {
                **files,
                "ada/small.ipynb": notebook(),
                "blaise/small.ipynb": notebook(),
                "chloe/timestamp.txt": b"soon",
            }
        )
    )
    assert {item.student: item.late for item in inventory.items if item.late} == {"ada": 3600, "blaise": 7200}
    assert not (course / "submitted" / "chloe" / LAB / "timestamp.txt").exists()  # nbgrader would fail


def test_a_lab_that_was_never_released_is_refused(course: Path, folder: Callable[..., Path]) -> None:
    with open_course(course).gradebook as gradebook:
        gradebook.remove_assignment(LAB)
    with pytest.raises(UserError, match="is not in the gradebook"):
        collect(open_course(course), find_lab(LAB, source_labs()), folder({"ada/small.ipynb": notebook()}))


# -- a student's invalid files affect only that student


def link(place: Path) -> None:
    (place / "small.ipynb").symlink_to("/etc/passwd")


def folder_link(place: Path) -> None:
    (place / "data").symlink_to("/etc")


def pipe(place: Path) -> None:
    os.mkfifo(place / "small.ipynb")


def two_names_in_one(place: Path) -> None:
    (place / "Small.ipynb").write_bytes(b"1")
    (place / "small.ipynb").write_bytes(b"2")


def deep(place: Path) -> None:
    (place / "/".join("d" * 30)).mkdir(parents=True)


def long_path(place: Path) -> None:
    (place / "/".join(["d" * 150] * 8)).mkdir(parents=True)
    (place / "/".join(["d" * 150] * 8) / "x").write_bytes(b"")


def large(place: Path) -> None:
    (place / "data.bin").touch()
    os.truncate(place / "data.bin", 65 << 20)


def many(place: Path) -> None:
    for number in range(201):
        (place / f"{number}.txt").touch()


def test_a_link_beside_a_notebook_is_left_out_with_a_note(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path
) -> None:
    source = folder({"ada/small.ipynb": notebook("ada"), "ada/data.txt": b"1"})
    (source / "ada" / "latest").symlink_to("small.ipynb")
    (source / "ada" / "copy.ipynb").symlink_to("/etc/passwd")
    (source / "ada" / "folder").symlink_to("/etc")
    os.mkfifo(source / "ada" / "pipe")
    item = line(take(source), "ada")
    assert item.state is ItemState.NEW
    assert item.notes == ("left out, because it is no regular file: copy.ipynb, folder, latest, pipe",)
    assert everything(course) == {
        f"submitted/ada/{LAB}/data.txt": b"1",
        f"submitted/ada/{LAB}/small.ipynb": notebook("ada"),
    }


def test_a_refused_submission_is_no_missing_one(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path
) -> None:
    source = folder({"ada/small.ipynb": notebook("ada")})
    (source / "ada" / "small.ipynb").unlink()
    link(source / "ada")
    take(source)
    table = read_grades(open_course(course), find_lab(LAB, source_labs()))
    assert {row.student: row.status for row in table.rows}["ada"] == "REFUSED"
    assert has_no_points(next(row for row in table.rows if row.student == "ada"))


def test_collecting_waits_for_the_grader_of_the_lab(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path
) -> None:
    opened, lab = open_course(course), find_lab(LAB, source_labs())
    source = folder({"ada/small.ipynb": notebook("ada")})
    said: list[str] = []
    with ThreadPoolExecutor(1) as other:
        with only_grader(course / "grades" / LAB):
            with pytest.raises(UserError, match=rf"another grader \(process {os.getpid()}\) is at work"):
                collect(opened, lab, source)
            waiting = threading.Event()

            def wait(process: str) -> None:
                said.append(process)
                waiting.set()

            done = other.submit(lambda: collect(open_course(course), lab, source, wait))
            assert waiting.wait(60)
            assert not (course / "submitted" / "ada").exists()
        assert line(done.result(60), "ada").state is ItemState.NEW
    assert said == [str(os.getpid())]


@pytest.mark.parametrize("hand_in", [link, folder_link, pipe, two_names_in_one, deep, long_path, large, many])
def test_an_invalid_submission_is_refused_for_its_student_only(
    take: Callable[..., Inventory], folder: Callable[..., Path], course: Path, hand_in: Callable[[Path], None]
) -> None:
    source = folder({"ada/small.ipynb": notebook("before")})
    take(source)
    (source / "ada" / "small.ipynb").unlink()
    hand_in(source / "ada")
    inventory = take(folder({"blaise/small.ipynb": notebook("blaise")}))
    item = line(inventory, "ada")
    assert item.state is ItemState.REFUSED
    assert "what was received before is kept" in item.notes
    assert item.sha256 == hashlib.sha256(notebook("before")).hexdigest()
    assert line(inventory, "blaise").state is ItemState.NEW
    assert everything(course) == {
        f"submitted/ada/{LAB}/small.ipynb": notebook("before"),
        f"submitted/blaise/{LAB}/small.ipynb": notebook("blaise")
    }  # fmt: skip


def test_unprintable_characters_of_names_are_replaced(
    take: Callable[..., Inventory],
    folder: Callable[..., Path],
) -> None:
    inventory = take(folder({"\x1b[31mred/small.ipynb": notebook(), "ada/\u202egpj.ipynb": notebook()}))
    assert line(inventory, "?[31mred").state is ItemState.UNKNOWN
    assert line(inventory, "ada").notebook == "?gpj.ipynb"
    assert "\x1b" not in inventory.csv()


# -- Moodle's zip


def test_moodle_file_names_identify_the_students(
    take: Callable[..., Inventory],
    zipped: Callable[..., Path],
    course: Path,
) -> None:
    inventory = take(
        zipped(
            {
                MOODLE: notebook("chloe"),
                "Blaise Pascal_1235_assignsubmission_file/small.ipynb": notebook("blaise"),
                "Blaise Pascal_1235_assignsubmission_onlinetext/onlinetext.html": b"<p>see file</p>",
                "LOVELACE Ada_1236_assignsubmission_file_/small.ipynb": notebook("ada"),
                "Dan Moore_1237_assignsubmission_file_small.ipynb": notebook("which dan?"),
                "Zoe Unknown_1238_assignsubmission_file_small.ipynb": notebook("zoe"),
            }
        )
    )
    assert states(inventory) == {
        "ada": ItemState.NEW, "blaise": ItemState.NEW, "chloe": ItemState.NEW,
        "Dan Moore": ItemState.UNKNOWN, "Zoe Unknown": ItemState.UNKNOWN,
    }  # fmt: skip
    assert "several students have this name" in line(inventory, "Dan Moore").notes[0]
    assert (course / "submitted" / "chloe" / LAB / "small.ipynb").read_bytes() == notebook("chloe")
    assert {notebook("which dan?"), notebook("zoe")} <= set(everything(course).values())


def test_a_timestamp_file_in_moodle_is_ignored(
    take: Callable[..., Inventory],
    zipped: Callable[..., Path],
    course: Path,
) -> None:
    with open_course(course).gradebook as gradebook:
        gradebook.update_or_create_assignment(LAB, duedate="2026-11-18 12:00:00 UTC")
    source = zipped(
        {MOODLE: notebook(), MOODLE.replace("small.ipynb", "timestamp.txt"): b"2026-11-01 12:00:00 UTC"}
    )
    item = line(take(source), "chloe")
    assert item.submitted is not None
    assert item.submitted.date() >= datetime(2026, 11, 19).date()
    assert item.late > 0
    assert item.notes == ("late by the zip's dates: Moodle's page has the true one",)


def test_two_submissions_under_one_name_are_both_refused(
    take: Callable[..., Inventory],
    zipped: Callable[..., Path],
) -> None:
    item = line(take(zipped({MOODLE: notebook("1"), MOODLE.replace("1234", "1299"): notebook("2")})), "chloe")
    assert item.state is ItemState.REFUSED
    assert (
        "several submissions of one student: Chloé Dupont (1234), Chloé Dupont (1299); leave only one"
        in item.notes[0]
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../../gradebook.db", "a path out of the archive"),
        ("ada/../../secret", "a path out of the archive"),
        ("ada\\..\\..\\secret", "a path out of the archive"),
        ("/etc/cron.d/x", "an absolute path"),
        ("C:\\Windows\\x.ipynb", "an absolute path"),
        ("ada/small\n.ipynb", "a name with control characters"),
        ("ada/small.ipynb\0.png", "a name with control characters"),
    ],
)
def test_a_zip_with_paths_outside_is_refused_as_a_whole(
    take: Callable[..., Inventory], zipped: Callable[..., Path], course: Path, name: str, reason: str
) -> None:
    source = zipped({MOODLE: notebook(), "X" * len(name.encode()): b"x"})
    source.write_bytes(source.read_bytes().replace(b"X" * len(name.encode()), name.encode()))
    with pytest.raises(UserError, match=reason) as refused:
        take(source)
    assert "\n" not in str(refused.value)
    assert everything(course) == {}


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFBLK], ids=["link", "pipe", "device"])
def test_a_zip_with_a_link_or_a_device_is_refused_as_a_whole(
    take: Callable[..., Inventory], zipped: Callable[..., Path], course: Path, kind: int
) -> None:
    with pytest.raises(UserError, match="which is a link or a device"):
        take(zipped({MOODLE: b"/etc/passwd"}, external_attr=(kind | 0o777) << 16))
    assert everything(course) == {}


def altered(source: Path, offset: int, value: bytes, all_members: bool = False) -> Path:
    """Replace bytes in the central directory of a zip, of the first member or of all."""
    content = bytearray(source.read_bytes())
    place = content.index(b"PK\x01\x02")
    while place != -1:
        content[place + offset : place + offset + len(value)] = value
        place = content.find(b"PK\x01\x02", place + 1) if all_members else -1
    source.write_bytes(content)
    return source


def test_a_zip_with_a_huge_stated_size_is_refused_as_a_whole(
    take: Callable[..., Inventory], zipped: Callable[..., Path], course: Path
) -> None:
    source = zipped({f"a{number}.ipynb": b"x" for number in range(3)})
    with pytest.raises(UserError, match="unpacks to more than 8 GiB"):
        take(altered(source, 24, struct.pack("<I", 0xF0000000), all_members=True))
    assert everything(course) == {}


def test_a_zip_bomb_affects_only_its_student(
    take: Callable[..., Inventory], zipped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dlo_lib.grading.classroom.collect.arrivals.MAX_BYTES",
        1 << 20,
    )  # 100 times smaller than the real limit
    source = zipped({MOODLE: b"\0" * (2 << 20), "ada.ipynb": notebook()})
    assert source.stat().st_size < 10_000
    inventory = take(source)
    assert states(inventory) == {"ada": ItemState.NEW, "chloe": ItemState.REFUSED}
    assert "is larger than 1 MB" in line(inventory, "chloe").notes[0]


def test_a_member_that_is_larger_than_it_states_is_damaged(
    take: Callable[..., Inventory], zipped: Callable[..., Path]
) -> None:
    item = line(take(altered(zipped({MOODLE: b"\0" * 10_000}), 24, struct.pack("<I", 10))), "chloe")
    assert item.state is ItemState.REFUSED
    assert "is damaged in the zip" in item.notes[0]


def test_an_encrypted_member_affects_only_its_student(
    take: Callable[..., Inventory],
    zipped: Callable[..., Path],
) -> None:
    inventory = take(
        altered(zipped({MOODLE: notebook(), "ada.ipynb": notebook()}), 8, struct.pack("<H", 0x801))
    )
    assert states(inventory) == {"ada": ItemState.NEW, "chloe": ItemState.REFUSED}
    assert "is encrypted" in line(inventory, "chloe").notes[0]


@pytest.mark.parametrize(
    "content", [b"", b"not a zip", b"PK\x03\x04" + b"\0" * 40], ids=["empty", "text", "cut"]
)
def test_an_invalid_zip_is_refused(take: Callable[..., Inventory], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "moodle.zip").write_bytes(content)
    with pytest.raises(UserError, match="is not a zip that can be read"):
        take(tmp_path / "moodle.zip")
    with pytest.raises(UserError, match="give a folder, or the zip that Moodle made"):
        take(tmp_path / "none.zip")


# -- nbgrader's exchange


@pytest.fixture
def hand_in(course: Path) -> Callable[..., Path]:
    """Write a submission into the exchange as `nbgrader submit` names it."""

    def write(student: str, time: str, answer: str, lab: str = LAB) -> Path:
        place = course.parent / "exchange" / "dlo" / "inbound" / f"{student}+{lab}+{time} UTC+nonce"
        place.mkdir()
        (place / "small.ipynb").write_bytes(notebook(answer))
        (place / "timestamp.txt").write_text(f"{time} UTC")
        return place

    return write


def test_the_last_submission_in_the_exchange_counts(
    take: Callable[..., Inventory], hand_in: Callable[..., Path], course: Path
) -> None:
    hand_in("ada", "2026-11-20 11:00:00.5", "first")
    hand_in("ada", "2026-11-20 12:00:00.5", "last")
    hand_in("ada", "2026-11-20 13:00:00.5", "of another lab", lab="13_dp_limit")
    hand_in("zoe", "2026-11-20 12:00:00.5", "nobody")
    assert states(take()) == {"ada": ItemState.NEW, "zoe": ItemState.UNKNOWN}
    assert (course / "submitted" / "ada" / LAB / "small.ipynb").read_bytes() == notebook("last")
    hand_in("ada", "2026-11-20 14:00:00.5", "later")
    assert line(take(), "ada").state is ItemState.REPLACED


def test_an_account_that_differs_in_case_is_another_student(
    take: Callable[..., Inventory], hand_in: Callable[..., Path], course: Path
) -> None:
    hand_in("ada", "2026-11-20 11:00:00.5", "ada's own")
    hand_in("ADA", "2026-11-20 12:00:00.5", "not ada's")
    assert states(take()) == {"ada": ItemState.NEW, "ADA": ItemState.UNKNOWN}
    assert (course / "submitted" / "ada" / LAB / "small.ipynb").read_bytes() == notebook("ada's own")


def test_a_submission_under_another_account_is_refused(
    take: Callable[..., Inventory],
    hand_in: Callable[..., Path],
    course: Path,
) -> None:
    with open(course / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write("c.ExchangeCollect.check_owner = True\n")
    hand_in("ada", "2026-11-20 11:00:00.5", "forged")
    inventory = take()
    assert [item.state for item in inventory.items if item.student == "ada"] == [
        ItemState.MISSING,
        ItemState.REFUSED,
    ]
    assert "written by" in inventory.items[-1].notes[0]
    assert not (course / "submitted" / "ada").exists()


def test_invalid_entries_of_the_exchange_do_not_stop_the_collection(
    take: Callable[..., Inventory], hand_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlo_lib.grading.classroom.collect.arrivals.MOST_WALKED", 50)
    full = hand_in("blaise", "2026-11-20 11:00:00.5", "many files")
    for number in range(60):
        (full / f"{number}.txt").touch()
    hand_in("chloe", "yesterday", "no time")
    (full.parent / f"dan+{LAB}+2026-11-20 11:00:00 UTC+x").symlink_to("/etc")
    (full.parent / f"+{LAB}+").mkdir()
    (full.parent / "a+b").touch()
    hand_in("ada", "2026-11-20 11:00:00.5", "honest")
    inventory = take()
    assert line(inventory, "ada").state is ItemState.NEW
    assert {item.student for item in inventory.of(ItemState.REFUSED)} == {"blaise", "chloe", "dan"}
    assert all(item.sha256 == "" for item in inventory.items if item.student != "ada")


def test_a_stated_time_before_the_files_change_time_is_noted(
    take: Callable[..., Inventory],
    hand_in: Callable[..., Path],
) -> None:
    hand_in("ada", "2001-01-01 11:00:00.0", "back-dated")
    (note,) = line(take(), "ada").notes
    assert "hours after the time it states" in note


def test_a_missing_exchange_is_named_with_the_cure(take: Callable[..., Inventory], course: Path) -> None:
    (course.parent / "exchange" / "dlo" / "inbound").rmdir()
    with pytest.raises(
        UserError, match="release the lab first, or say where the submissions are with --from"
    ):
        take()


@pytest.mark.parametrize("at", ["a folder", "a file", "the inventory"])
def test_on_a_full_disk_what_was_collected_before_stays(
    course: Path,
    folder: Callable[..., Path],
    take: Callable[..., Inventory],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    take(folder({"ada/91_small/small.ipynb": notebook("ada")}))
    before = everything(course)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    if at == "a folder":
        monkeypatch.setattr(collection.tempfile, "TemporaryDirectory", full)
    elif at == "a file":
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        monkeypatch.setattr(files.os, "fsync", full)
    source = {"ada/91_small/small.ipynb": notebook("ada"), "dan/91_small/small.ipynb": notebook("dan")}
    for name, content in source.items():  # not by Path.write_bytes
        (course.parent / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        with open(course.parent / "in" / name, "wb") as file:
            file.write(content)
    with pytest.raises(UserError, match="is full: free some space and collect again") as error:
        take(course.parent / "in")
    assert "nothing was changed" not in str(error.value)  # the submission of dan may be there
    assert {name: content for name, content in everything(course).items() if "dan" not in name} == before
