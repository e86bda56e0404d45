"""Points and comments given by hand belong to the submission that the grader read, and results keep the
version of their checks.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.export import GradeRow, GradeTable, read_grades
from dlo_lib.grading.classroom.gradebook.moodle import moodle_csv
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.gradebook.regrade import CHANGES, KEPT
from dlo_lib.grading.classroom.publish.publication import publish
from dlo_lib.grading.judge.client import JudgeClient
from dlo_lib.grading.judge.report_store import report_file
from dlo_lib.grading.lab.course import find_lab, source_labs
from tests.grading.small_class import LAB, hand_in, right, small_lab, wrong_scale

NOTE = (
    "blaise: set aside, because they were given by hand for the submission of 2026-11-20 12:00:00 UTC: "
    "scale 2.5 +1, scale a comment"
)


@pytest.fixture
def graded(ungraded: Path, graded_class: Path, tmp_path: Path) -> Path:
    """A graded class, in which a grader gave 2.5 points, a bonus and a comment to blaise."""
    course = tmp_path / "graded"
    shutil.copytree(graded_class, course, symlinks=True)
    by_hand(course, "blaise", 2.5, 1.0, "a good idea")
    return course


@pytest.fixture
def grade(judges: JudgeClient) -> Callable[..., GradeTable]:
    def run(course: Path, **options: Any) -> GradeTable:
        lab = find_lab("91", source_labs())
        return grade_lab(lab, course, options=Options(only="blaise", unsafe=True, **options), judges=judges)

    return run


def by_hand(
    course: Path, student: str, points: float | None, extra: float | None = None, comment: str | None = None
) -> None:
    """Enter points and a comment as formgrader does."""
    with open_course(course).gradebook as gradebook:
        given = gradebook.find_grade("test_scale", "small", LAB, student)
        given.manual_score, given.extra_credit, given.needs_manual_grade = points, extra, False
        gradebook.find_comment("scale", "small", LAB, student).manual_comment = comment
        gradebook.db.commit()


def entered(course: Path) -> tuple[float | None, float | None, str | None, bool]:
    with open_course(course).gradebook as gradebook:
        given = gradebook.find_grade("test_scale", "small", LAB, "blaise")
        comment = gradebook.find_comment("scale", "small", LAB, "blaise").manual_comment
        return given.manual_score, given.extra_credit, comment, given.needs_manual_grade


def row(table: GradeTable) -> GradeRow:
    return {row.student: row for row in table.rows}["blaise"]


def again(course: Path) -> None:
    """Blaise submits another notebook."""
    hand_in(course, "blaise", json.dumps(right(small_lab())))


def test_they_stay_when_the_same_submission_is_judged_again(graded: Path, grade: Callable) -> None:
    table = grade(graded)
    assert (row(table).scores["scale"], table.notes) == (3.5, ())
    assert entered(graded) == (2.5, 1.0, "a good idea", True)


def test_a_new_submission_sets_them_aside(graded: Path, grade: Callable) -> None:
    grade(graded)
    again(graded)
    table = grade(graded)
    assert row(table).scores["scale"] == 3.0  # the judge's points of the new submission
    assert entered(graded) == (None, None, None, True)
    assert table.notes[0] == NOTE
    assert table.notes[1].startswith("`dlo grade 91_small --keep-manual` gives them to the new submission;")
    assert grade(graded).notes == table.notes  # until a grader has reviewed the new submission
    assert entered(graded)[3]
    by_hand(graded, "blaise", 1.0)
    assert grade(graded).notes == ()
    assert entered(graded)[0] == 1.0


def test_a_review_that_confirms_the_judge_ends_the_note(graded: Path, grade: Callable) -> None:
    grade(graded)
    again(graded)
    grade(graded)
    by_hand(graded, "blaise", None)
    assert grade(graded).notes == ()


@pytest.mark.parametrize("when", ["at once", "after they were set aside"])
def test_the_option_gives_them_to_the_new_submission(graded: Path, grade: Callable, when: str) -> None:
    grade(graded)
    again(graded)
    if when != "at once":
        assert grade(graded).notes
    table = grade(graded, keep_manual=True)
    assert (row(table).scores["scale"], table.notes) == (3.5, ())
    assert entered(graded) == (2.5, 1.0, "a good idea", True)
    assert grade(graded).notes == ()
    assert entered(graded)[:3] == (2.5, 1.0, "a good idea")


def test_each_set_aside_entry_is_kept_and_the_newest_comes_back(graded: Path, grade: Callable) -> None:
    grade(graded)
    again(graded)
    grade(graded)
    by_hand(graded, "blaise", 0.5)
    hand_in(graded, "blaise", json.dumps(wrong_scale(small_lab())))
    assert "scale 0.5" in grade(graded).notes[0]
    grade(graded, keep_manual=True)
    assert entered(graded)[0] == 0.5
    by_hand(graded, "blaise", None)
    grade(graded, keep_manual=True)
    assert entered(graded)[:3] == (2.5, 1.0, "a good idea")


def test_the_late_penalty_is_that_of_the_new_submission(graded: Path, grade: Callable) -> None:
    with open(graded / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write("\nc.LateSubmissionPlugin.penalty_method = 'zero'\n")
    with open_course(graded).gradebook as gradebook:
        gradebook.update_or_create_assignment(LAB, duedate="2026-11-20 18:00:00")
    assert row(grade(graded)).penalty == 0
    again(graded)
    (graded / "submitted" / "blaise" / LAB / "timestamp.txt").write_text("2026-11-21 12:00:00 UTC")
    late = row(grade(graded))
    assert (sum(late.scores.values()), late.penalty, late.total) == (12, 12, 0)


def test_points_above_the_maximum_are_a_bonus_and_not_lost(graded: Path, grade: Callable) -> None:
    by_hand(graded, "blaise", 2.0, 4.0)
    table = grade(graded)
    assert row(table).scores["scale"] == 6.0
    assert table.lost_and_bonus(row(table)) == ("", "scale +3")
    assert "bonus: scale +3" in moodle_csv(table, {})
    assert "-3" not in moodle_csv(table, {})


def test_changed_checks_are_named_with_the_totals_that_they_change(
    graded: Path, grade: Callable, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(graded, "blaise", None)
    before = row(grade(graded))
    shutil.copytree(checkout, tmp_path / "checkout")
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "checkout"))
    text = tmp_path / "checkout" / "solutions" / LAB / f"{LAB}.py"
    text.write_text(text.read_text() + "\n")
    lab = find_lab("91", source_labs())
    stale = read_grades(open_course(graded), lab).notes
    assert stale[0].startswith("graded with an earlier version of the checks: ada, blaise, chloe, dorothy; ")
    with open_course(graded).gradebook as gradebook:  # the total at this moment, which results.json lacks
        (notebook,) = gradebook.find_submission(LAB, "blaise").notebooks
        for grade_ in notebook.grades:
            grade_.auto_score = 1.0 if grade_.name == "test_mean" else 0.0
        gradebook.db.commit()
        gradebook.db.refresh(notebook)
        earlier = notebook.score
    assert earlier != before.total
    (graded / "grades" / LAB / KEPT).unlink()  # as if feedback had been released now
    report = report_file(graded / "grades" / LAB / "reports", "blaise")
    values = json.loads(report.read_text())
    checks = values["report"]["questions"]["scale"]["checks"]
    check = next(each for each in checks if each["points"] == 0)
    check["points"] = check["maximum"]  # the earlier checks passed it
    report.write_text(json.dumps(values))
    table = grade(graded)
    assert row(table).checks != before.checks
    assert table.notes[0] == (
        f"blaise: {earlier:g} points before, {before.total:g} now; the checks have changed "
        f"({before.checks} → {row(table).checks})"
    )
    assert table.notes[1] == (
        f"scale, {check['name']} ({check['title']}): 1 lose {check['maximum']:g} points by it: blaise"
    )
    (named,) = csv.DictReader((graded / "grades" / LAB / CHANGES).read_text().splitlines())
    assert (named["student"], named["check"], named["points_now"]) == ("blaise", check["name"], "0")
    assert table.notes[3].startswith("graded with an earlier version of the checks: ada, chloe, dorothy; ")
    assert table.notes[2] in read_grades(open_course(graded), lab).notes


def test_a_second_release_changes_what_a_question_is_worth(
    graded: Path, grade: Callable, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = row(grade(graded))
    root = tmp_path / "checkout"
    shutil.copytree(checkout, root)
    monkeypatch.setenv("DLO_COURSE", str(root))
    with (graded / "nbgrader_config.py").open("a") as config:
        config.write(f"c.Exchange.root = {str(tmp_path / 'exchange')!r}\n")
    (graded / "solutions").unlink()
    (graded / "solutions").symlink_to(root / "solutions")
    checks = root / "labs" / LAB / "checks" / "questions.py"
    first, marker, rest = checks.read_text().partition('@check("quantise", points=3)')
    checks.write_text(f"{first}{marker.replace('3', '5')}{rest}")

    lab = find_lab("91", source_labs())
    publish(open_course(graded), lab, again=True)
    stale = read_grades(open_course(graded), lab)
    assert row(stale).total == before.total
    assert stale.notes[0].startswith(
        "graded with an earlier version of the checks: ada, blaise, chloe, dorothy; "
    )
    # The service of the fixture judges the earlier checks.
    table = grade_lab(lab, graded, options=Options(only="blaise", unsafe=True))
    assert row(table).scores["quantise"] == before.scores["quantise"] + 2
    assert row(table).scores["scale"] == before.scores["scale"] == 3.5  # given by hand for this submission
    assert f"blaise: {before.total:g} points before, {before.total + 2:g} now" in table.notes[0]
    with open_course(graded).gradebook as gradebook:
        assert gradebook.find_grade("test_quantise", "small", LAB, "blaise").max_score == 6.0
