"""A regrade lists who loses what by which check, until the feedback is released."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.grading.classroom.gradebook.regrade import (
    CHANGES,
    KEPT,
    changes_of,
    end_comparison,
    keep_points,
    pending_note,
    write_changes,
)
from dlo_lib.grading.judge.report import CheckReport, Report, question_report
from dlo_lib.grading.judge.report_store import StoredReport, report_file

OLD, NEW = "old", "new"


def graded(folder: Path, student: str, **points: float) -> None:
    """Store the report of a student who has these points of 2 by each check."""
    checks = tuple(
        CheckReport(
            name, f"Title of {name}", each, 2.0, "PASSED" if each else "WRONG", "a message", "", False
        )
        for name, each in points.items()
    )
    report = Report("91_small", "GRADED", {"mean": question_report("mean", checks)})
    StoredReport("key", report, True, {}).save(report_file(folder / "reports", student))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reports").mkdir()
    return tmp_path


def kept(folder: Path, **versions: str) -> None:
    keep_points(folder, folder / "reports", versions)


def changed(folder: Path, **versions: str) -> list[str]:
    return write_changes(folder, changes_of(folder, folder / "reports", versions))


def test_each_loss_and_each_gain_is_listed_and_losses_are_named_by_check(folder: Path) -> None:
    for student in ("ada", "blaise"):
        graded(folder, student, traffic=2.0, values=0.0, gone=1.0)
    graded(folder, "chloe", traffic=2.0)
    kept(folder, ada=OLD, blaise=OLD, chloe=OLD, dorothy=OLD, evariste="")
    for student in ("ada", "blaise"):
        graded(folder, student, traffic=0.0, values=2.0)
    traffic, gone, pending = changed(folder, ada=NEW, blaise=NEW, chloe=NEW)
    assert traffic == "mean, traffic (Title of traffic): 2 lose 4 points by it: ada, blaise"
    assert gone == "mean, gone (): 2 lose 2 points by it: ada, blaise"
    assert pending == pending_note(folder)
    lines = (folder / CHANGES).read_text().splitlines()
    assert lines[1:3] == [
        "ada,mean,traffic,Title of traffic,2,0,WRONG,a message",
        "ada,mean,values,Title of values,0,2,PASSED,a message",
    ]
    assert len(lines) == 1 + 2 * 3


def test_a_second_regrade_is_compared_with_what_was_released(folder: Path) -> None:
    graded(folder, "ada", traffic=2.0)
    kept(folder, ada=OLD)
    graded(folder, "ada", traffic=0.0)
    assert len(changed(folder, ada=NEW)) == 2
    kept(folder, ada=NEW)  # the next regrade, before a release
    assert len(changed(folder, ada="newer")) == 2
    end_comparison(folder)
    assert pending_note(folder) == ""
    kept(folder, ada="newer")
    assert changed(folder, ada="newest") == []


def test_the_same_checks_change_nothing_and_a_torn_file_is_none(folder: Path) -> None:
    graded(folder, "ada", traffic=2.0)
    kept(folder, ada=OLD)
    graded(folder, "ada", traffic=0.0)  # a new submission
    assert changed(folder, ada=OLD) == []
    for torn in ("{", "[1]", '{"ada": {}}', '{"ada": 3}'):
        (folder / KEPT).write_text(torn)
        assert changed(folder, ada=NEW) == []


def test_a_note_names_ten_students(folder: Path) -> None:
    students = [f"s{number:02}" for number in range(12)]
    for student in students:
        graded(folder, student, traffic=2.0)
    kept(folder, **dict.fromkeys(students, OLD))
    for student in students:
        graded(folder, student, traffic=1.0)
    note, _ = changed(folder, **dict.fromkeys(students, NEW))
    assert note.endswith("12 lose 12 points by it: " + ", ".join(students[:10]) + " and 2 more")
