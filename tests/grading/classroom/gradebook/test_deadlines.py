"""Deadlines count in the gradebook as the course file is now; late work never replaces work that was on time
silently.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.collect.collection import collect
from dlo_lib.grading.classroom.gradebook.deadlines import publish_deadlines, settle
from dlo_lib.grading.classroom.gradebook.export import read_grades, settled_grades
from dlo_lib.grading.classroom.gradebook.inventory import Item, ItemState
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.roster.course_file import FILE
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.times import DEADLINES_FILE
from tests.grading.small_class import LAB

RULE = 'timezone = "Europe/Paris"\n[late]\nper_day = 1\n'
DUE = "[labs.91]\ndue = 2026-11-20T12:00:00\n"


@pytest.fixture
def write(course: Path) -> Callable[[str], None]:
    return lambda text: (course / FILE).write_text(text, encoding="utf-8") and None


@pytest.fixture
def scored(course: Path) -> Path:
    """The gradebook has three submissions with 10 points each, two of them late; nothing was judged."""
    with open_course(course).gradebook as gradebook:
        for student, time in (("ada", "20 10:00"), ("blaise", "21 14:00"), ("chloe", "22 14:00")):
            gradebook.update_or_create_submission(LAB, student, timestamp=f"2026-11-{time}:00 UTC")
            (notebook,) = gradebook.find_submission(LAB, student).notebooks
            left = 10.0
            for grade in notebook.grades:
                grade.auto_score = min(left, grade.max_score)
                left -= grade.auto_score
        gradebook.db.commit()
    return course


def penalties(course: Path) -> dict[str, tuple[float, float]]:
    """Return the penalty and the extension in hours of each student."""
    with open_course(course).gradebook as gradebook:
        return {
            submission.student_id: (
                submission.notebooks[0].late_submission_penalty or 0.0,
                submission.extension.total_seconds() / 3600 if submission.extension else 0.0,
            )
            for submission in gradebook.assignment_submissions(LAB)
        }


def lab():
    return find_lab(LAB, source_labs())


def test_a_moved_deadline_and_an_extension_count_without_a_new_judgement(scored: Path, write) -> None:
    write(RULE + DUE)
    settle(open_course(scored), lab())
    assert penalties(scored) == {"ada": (0, 0), "blaise": (2, 0), "chloe": (3, 0)}
    write(RULE + DUE + 'extensions = { chloe = "2 days" }\n')
    settle(open_course(scored), lab())
    assert penalties(scored) == {"ada": (0, 0), "blaise": (2, 0), "chloe": (1, 48)}
    write(RULE + DUE.replace("-20T", "-22T"))
    settle(open_course(scored), lab())
    assert penalties(scored) == {"ada": (0, 0), "blaise": (0, 0), "chloe": (1, 0)}
    with open_course(scored).gradebook as gradebook:  # formgrader shows the same date
        assert f"{gradebook.find_assignment(LAB).duedate}" == "2026-11-22 11:00:00"
    write(RULE.replace("per_day = 1", 'per_day = "50 %"\nat_most = 2') + DUE)
    settle(open_course(scored), lab())
    assert penalties(scored)["chloe"] == (2, 0)


def test_a_due_date_of_formgrader_counts_if_the_file_has_none(scored: Path, write) -> None:
    with open_course(scored).gradebook as gradebook:
        gradebook.update_or_create_assignment(LAB, duedate="2026-11-21 13:00:00 UTC")
    write(RULE)
    settle(open_course(scored), lab())
    assert penalties(scored) == {"ada": (0, 0), "blaise": (1, 0), "chloe": (2, 0)}


def test_a_plug_in_counts_at_a_moved_deadline_too_and_not_beside_the_table(scored: Path, write) -> None:
    with open(scored / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write("c.LateSubmissionPlugin.penalty_method = 'zero'\n")
    write('timezone = "Europe/Paris"\n' + DUE.replace("-20T", "-22T"))
    settle(open_course(scored), lab())
    assert penalties(scored) == {"ada": (0, 0), "blaise": (0, 0), "chloe": (10, 0)}
    write(RULE + DUE)
    with pytest.raises(UserError, match="sets penalties for late work, and so does nbgrader_config.py"):
        settle(open_course(scored), lab())
    assert penalties(scored)["chloe"] == (10, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RULE + DUE + "extensions = { aba = '1 day' }", "did you mean ada?"),
        (RULE + "[labs.91]\nextensions = { ada = '1 day' }", "has extensions and no due date: add due ="),
    ],
)
def test_an_extension_that_cannot_count_is_refused(course: Path, write, text: str, said: str) -> None:
    write(text)
    with pytest.raises(UserError, match=said):
        settle(open_course(course), lab())


def test_lateness_is_in_the_table(scored: Path, write) -> None:
    graded = scored / "autograded" / "blaise" / LAB / "small.ipynb"
    graded.parent.mkdir(parents=True)
    graded.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', encoding="utf-8")
    write(RULE + DUE)
    table = settled_grades(open_course(scored), lab())
    row = {row.student: row for row in table.rows}["blaise"]
    assert (row.seconds_late, row.penalty, row.total) == (27 * 3600, 2, 8)
    assert "blaise,91_small" in table.csv()
    assert ",97200,2,8," in table.csv()


def test_students_can_read_the_due_dates_and_no_extension(course: Path, write) -> None:
    write(RULE + DUE + 'extensions = { ada = "2 days" }\n')
    assert publish_deadlines(open_course(course)) == ""
    text = (course.parent / "exchange" / "dlo" / DEADLINES_FILE).read_text(encoding="utf-8")
    assert json.loads(text) == {
        "timezone": "Europe/Paris",
        "labs": {
            LAB: {
                "due": "2026-11-20T11:00:00+00:00",
                "grace_ends": "2026-11-20T11:00:00+00:00",
                "late": "1 point less a day",
                "replaces": False,
            }
        },
    }


# -- late work beside work that was on time


@pytest.fixture
def submit(course: Path) -> Callable[[str, str], None]:
    def into_exchange(time: str, text: str) -> None:
        folder = course.parent / "exchange" / "dlo" / "inbound" / f"ada+{LAB}+2026-11-{time}:00 UTC+x"
        folder.mkdir()
        cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": text}
        notebook = {"cells": [cell], "metadata": {"dlo": {"lab": LAB}}, "nbformat": 4, "nbformat_minor": 5}
        (folder / "small.ipynb").write_text(json.dumps(notebook), encoding="utf-8")

    return into_exchange


def collected(course: Path, source: Path | None = None) -> tuple[Item, str]:
    """Return ada's line of the inventory, and the text of the submission that counts."""
    inventory = collect(open_course(course), lab(), source)
    (item,) = (item for item in inventory.items if item.student == "ada")
    file = course / "submitted" / "ada" / LAB / "small.ipynb"
    return item, json.loads(file.read_text(encoding="utf-8"))["cells"][0]["source"]


def late_files(course: Path) -> list[str]:
    found = sorted((course / "collected" / LAB / "late" / "ada").glob("*/small.ipynb"))
    return [json.loads(file.read_text(encoding="utf-8"))["cells"][0]["source"] for file in found]


def test_late_work_is_kept_beside_work_that_was_on_time(course: Path, write, submit) -> None:
    write(RULE + DUE)
    submit("20 10:00", "on time")
    submit("20 10:30", "on time, again")
    submit("22 14:00", "late")
    item, counts = collected(course)
    assert (counts, item.late, late_files(course)) == ("on time, again", 0, ["late"])
    note = item.notes[-1]
    assert note.startswith("a later submission of 2026-11-22 14:00:00 UTC is 2 d 3 h late and does not count")
    assert collected(course)[0].state is ItemState.UNCHANGED
    (said,) = (note for note in read_grades(open_course(course), lab()).notes if "late" in note)
    assert said.startswith("ada: the submission of 2026-11-22 15:00 CET, 2 d 3 h late, is kept in collected/")
    # another rule and another deadline count at the next collection, in both directions
    write(RULE + "replaces = true\n" + DUE)
    (said,) = (note for note in read_grades(open_course(course), lab()).notes if "ada" in note)
    assert "counts now: `dlo collect 91_small` takes it" in said
    assert collected(course)[1] == "late"
    write(RULE + DUE)
    assert collected(course)[1] == "on time, again"
    write(RULE + DUE + 'extensions = { ada = "3 days" }\n')
    item, counts = collected(course)
    assert (counts, item.late) == ("late", 0)


def test_late_work_in_a_folder_does_not_replace_work_that_was_on_time(
    course: Path, write, tmp_path: Path, submit
) -> None:
    write(RULE + DUE)
    submit("20 10:00", "on time")
    assert collected(course)[1] == "on time"
    late = tmp_path / "mail" / "ada"
    late.mkdir(parents=True)
    cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "late"}
    notebook = {"cells": [cell], "metadata": {"dlo": {"lab": LAB}}, "nbformat": 4, "nbformat_minor": 5}
    (late / "small.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    (late / "timestamp.txt").write_text("2026-11-22 14:00:00 UTC", encoding="utf-8")
    item, counts = collected(course, late.parent)
    assert (counts, item.state, late_files(course)) == ("on time", ItemState.UNCHANGED, ["late"])
    assert "does not count" in item.notes[-1]


def test_the_first_submission_counts_although_it_is_late(course: Path, write, submit) -> None:
    write(RULE + DUE)
    submit("21 14:00", "late")
    submit("22 14:00", "later")
    item, counts = collected(course)
    assert (counts, item.late, late_files(course)) == ("later", 51 * 3600, [])


def test_a_gradebook_that_another_program_holds_is_named(
    scored: Path, write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(RULE + DUE)
    settle(open_course(scored), lab())
    monkeypatch.setattr("dlo_lib.grading.classroom.gradebook.gradebook_file.LOCK_SECONDS", 0.0)
    opened = open_course(scored)
    with contextlib.closing(sqlite3.connect(scored / "gradebook.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        settle(opened, lab())  # nothing changes, so nothing is written
        write(RULE.replace("per_day = 1", "per_day = 2") + DUE)
        with pytest.raises(UserError, match="another program holds the gradebook"):
            settle(opened, lab())
    settle(opened, lab())
    assert penalties(scored)["chloe"] == (6, 0)
