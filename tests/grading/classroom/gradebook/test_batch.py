"""Grade a class: one row per student, equal rows after interruptions of the grader, and nbgrader's
gradebook.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.feedback.feedback import make_feedback
from dlo_lib.grading.classroom.gradebook import batch
from dlo_lib.grading.classroom.gradebook.batch import Done, Options, grade_lab
from dlo_lib.grading.classroom.gradebook.export import GradeTable, settled_grades
from dlo_lib.grading.classroom.gradebook.gradebook_entry import GradebookEntry
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.gradebook.regrade import CHANGES, end_comparison
from dlo_lib.grading.classroom.gradebook.timings import SHARED
from dlo_lib.grading.judge.client import JudgeClient, JudgeJob, Waiting
from dlo_lib.grading.judge.grader_lock import only_grader
from dlo_lib.grading.judge.report import GRADED, CheckReport, QuestionReport, Report
from dlo_lib.grading.judge.report_store import StoredReport
from dlo_lib.grading.lab.course import find_lab, given_folder, source_labs
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.sandbox.limits import descendants
from tests.grading.small_class import CLASS, LAB, graded_files, hand_in, results, right, rows, small_lab


@pytest.fixture(scope="module")
def lab(in_checkout: Path) -> LabSource:
    return small_lab()


@pytest.fixture(autouse=True)
def course(ungraded: Path) -> Path:
    return ungraded


@pytest.fixture
def grade(judges: JudgeClient) -> Callable[..., GradeTable]:
    """Grade a course, by default with the service that is running."""

    def run(
        course: Path, advance: Callable[[Done], None] | None = None, by: Any = judges, **options: Any
    ) -> GradeTable:
        return grade_lab(
            find_lab("91", source_labs()),
            course,
            advance,
            Options(**{"jobs": 2, "unsafe": True, **options}),
            by,
        )

    return run


@pytest.fixture
def undisturbed(graded_class: Path) -> Path:
    """The class graded in one go."""
    return graded_class


@pytest.fixture
def graded(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the class with its grades."""
    shutil.copytree(undisturbed, tmp_path / "graded", symlinks=True)
    return tmp_path / "graded"


def test_every_student_of_the_roster_has_a_row_with_the_status_of_each_question(undisturbed: Path) -> None:
    table = json.loads(results(undisturbed)[1])
    status = {row["student"]: row["status"].removesuffix(" (UNSANDBOXED)") for row in table["rows"]}
    assert status == {
        "ada": "GRADED",
        "blaise": "GRADED",
        "chloe": "NO_ATTEMPT",
        "dorothy": "GRADED",
        "evariste": "NO_ATTEMPT",
    }
    totals = {row["student"]: row["total"] for row in table["rows"]}
    assert totals["ada"] == totals["dorothy"] == 12
    assert 0 < totals["blaise"] < 12
    assert totals["chloe"] == totals["evariste"] == 0
    assert all(set(row["questions"]) == {"scale", "quantise", "mean", "quiz"} for row in table["rows"])


def test_times_are_those_of_the_students_and_a_row_of_what_they_share(undisturbed: Path) -> None:
    with open(undisturbed / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        *students, shared = list(csv.DictReader(file))
    assert shared.pop("student") == SHARED
    assert {kind for kind, value in shared.items() if float(value)} == {"shared_cpu_seconds"}
    own = {row["student"]: row for row in students}
    assert set(own) == set(CLASS)
    for kind in ("judge_cpu_seconds", "start_cpu_seconds"):
        assert float(own["ada"][kind]) > 0
    assert float(own["chloe"]["start_cpu_seconds"]) == 0  # no process was started


def test_parallel_and_sequential_runs_give_the_same_bytes(
    undisturbed: Path,
    course: Path,
    grade: Callable,
) -> None:
    grade(course, jobs=1)
    assert results(course) == results(undisturbed)
    assert all(timing not in results(course)[1] for timing in (b"_seconds", str(course).encode()))


def test_gradebook_and_graded_notebooks_are_those_of_nbgraders_own_command(
    undisturbed: Path, course: Path
) -> None:
    with open(course / "nbgrader_config.py", "a") as config:
        config.write("\nc.JudgeCells.unsafe = True\n")
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", "autograde", LAB],
        cwd=course,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert rows(course / "gradebook.db") == rows(undisturbed / "gradebook.db")
    assert graded_files(course) == graded_files(undisturbed)


def grader(course: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        "from dlo_lib.cli import main; main()",
        "grade",
        "91",
        "--unsafe",
        "--jobs",
        "2",
        *options,
    ]
    return subprocess.Popen(command, cwd=course, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_and_resumed_batch_gives_the_same_table(
    undisturbed: Path,
    course: Path,
    grade: Callable,
) -> None:
    """Kill the batch before the first row and after two rows; the second run first enters a report of the
    first run.
    """
    for rows_before in (0, 2):
        process = grader(course, "--resume")
        assert process.stdout is not None
        if rows_before == 0:
            reports = course / "grades" / LAB / "reports"
            while not list(reports.glob("*.json")):
                assert process.poll() is None
        for _ in range(rows_before):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    seen: list[Done] = []
    grade(course, seen.append, resume=True)
    assert len(seen) == len(CLASS)
    assert results(course) == results(undisturbed)
    assert rows(course / "gradebook.db") == rows(undisturbed / "gradebook.db")
    assert graded_files(course) == graded_files(undisturbed)


@pytest.mark.slow
def test_a_zygote_or_service_killed_in_the_middle_costs_no_row(
    undisturbed: Path, course: Path, grade: Callable
) -> None:
    with JudgeClient(find_lab("91", source_labs()), course, unsafe=True) as own:
        first = own.pid
        killed: list[int] = []

        def disturb(row: Done) -> None:
            zygotes = [
                pid
                for pid in descendants(own.pid)
                if b"grading.sandbox.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            if row.number == 2:  # the first was only screened
                os.kill(zygotes[0], signal.SIGKILL)
                killed.append(zygotes[0])
            if row.number == 3:
                os.kill(own.pid, signal.SIGKILL)
                killed.append(own.pid)

        grade(course, disturb, by=own, jobs=1)
        assert len(killed) == 2
        assert own.pid != first
    assert results(course) == results(undisturbed)
    assert rows(course / "gradebook.db") == rows(undisturbed / "gradebook.db")
    assert not Path(f"/proc/{killed[0]}/exe").exists()


class Scripted:
    """A judging service with given results: the statuses of the check by student, in turn."""

    def __init__(self, *turns: dict[str, str]) -> None:
        self.turns = list(turns)
        self.asked: list[tuple[list[str], int]] = []

    def screen(self, jobs: Iterable[JudgeJob], at_once: int) -> Iterator[tuple[JudgeJob, int]]:
        yield from ((job, 3) for job in jobs)

    def judge(
        self, jobs: Iterable[JudgeJob], at_once: int, waiting: Waiting | None = None
    ) -> Iterator[tuple[JudgeJob, int]]:
        jobs, statuses = list(jobs), self.turns.pop(0)
        self.asked.append(([job.student for job in jobs], at_once))
        for job in jobs:
            status = statuses.get(job.student, "OK")
            if status == "no judge":
                yield job, 1
                continue
            points = 3.0 if status == "OK" else 0.0
            check = CheckReport("check_scale", "", points, 3.0, status, "", "", False)
            question = QuestionReport("scale", points, 3.0, GRADED if status == "OK" else status, (check,))
            shutil.copyfile(job.notebook, job.rebuilt)
            report = Report(LAB, question.status, {"scale": question})
            StoredReport(job.key, report, at_once == 1, {}).save(job.report)
            yield job, 0


@pytest.mark.parametrize("starved", ["TIMEOUT", "OOM"])
def test_a_submission_out_of_time_or_memory_is_judged_again_alone(
    course: Path,
    grade: Callable,
    starved: str,
) -> None:
    script = Scripted({"blaise": starved, "chloe": starved}, {"chloe": starved})
    seen: list[Done] = []
    table = grade(course, seen.append, by=script)
    assert script.asked == [(list(CLASS), 2), (["blaise", "chloe"], 1)]
    assert [row.student for row in seen] == ["ada", "dorothy", "blaise", "chloe"]
    total = {row.student: row.total for row in table.rows}
    assert (total["blaise"], total["chloe"]) == (3, 0)
    again = Scripted({})
    grade(course, by=again, resume=True)
    assert again.asked == []  # it was judged alone, so it counts


def killed_after(rows_before: int, grade: Callable, course: Path, script: Scripted) -> None:
    """Grade in a child of this process, which ends as by SIGKILL after this number of rows."""

    def advance(done: Done) -> None:
        if done.number == rows_before:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            grade(course, advance, by=script)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_killed_regrade_releases_nothing_and_lists_all_losses_once_it_is_resumed(
    course: Path, grade: Callable, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, info = course / "grades" / LAB, find_lab("91", source_labs())
    grade(course, by=Scripted({}))
    end_comparison(folder)  # the feedback on these points is released
    shutil.copytree(checkout, tmp_path / "checkout")
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "checkout"))
    text = tmp_path / "checkout" / "solutions" / LAB / f"{LAB}.py"
    text.write_text(text.read_text() + "\n")  # other checks
    losers = {"ada": "WRONG", "dorothy": "WRONG"}
    whole = tmp_path / "whole"
    shutil.copytree(course, whole, symlinks=True)
    notes = grade(whole, by=Scripted(losers)).notes

    killed_after(2, grade, course, Scripted(losers))
    with open_course(course).gradebook as gradebook:
        score = {name: gradebook.find_submission(LAB, name).score for name in ("ada", "dorothy")}
    assert score == {"ada": 0.0, "dorothy": 3.0}  # one row is new, the other is not
    assert not (folder / CHANGES).exists()
    with pytest.raises(UserError, match=r"has not come to its end.*`dlo grade 91_small --resume`"):
        make_feedback(open_course(course), info)
    assert "has not come to its end" in settled_grades(open_course(course), info).notes[0]

    killed_after(1, grade, course, Scripted(losers))  # again, from the beginning
    grade(course, by=Scripted({}), only="blaise")  # one row more completes nothing
    assert "has not come to its end" in settled_grades(open_course(course), info).notes[0]
    rest = Scripted(losers)
    resumed = grade(course, by=rest, resume=True)
    assert rest.asked == [(["chloe", "dorothy"], 2)]
    changes = (folder / CHANGES).read_bytes()
    assert changes == (whole / "grades" / LAB / CHANGES).read_bytes()
    assert [row["student"] for row in csv.DictReader(changes.decode().splitlines())] == ["ada", "dorothy"]
    said = "scale, check_scale (): 2 lose 6 points by it: ada, dorothy"
    assert said in notes
    assert said in resumed.notes
    totals = [note for note in notes if "3 points before, 0 now" in note]
    assert [note.partition(":")[0] for note in totals] == ["ada", "dorothy"]
    assert [note for note in resumed.notes if "points before" in note] == totals
    assert results(course) == results(whole)
    assert "has not come" not in settled_grades(open_course(course), info).notes[0]
    assert make_feedback(open_course(course), info)


def test_a_failed_grading_removes_the_scores_of_an_earlier_one(graded: Path, grade: Callable) -> None:
    script = Scripted({"ada": "no judge"}, {"ada": "no judge"})
    row = {row.student: row for row in grade(graded, by=script, only="ada").rows}["ada"]
    assert (row.status, row.total) == ("GRADER_ERROR", 0)
    assert {score for student, _, score, *_ in rows(graded / "gradebook.db")[0] if student == "ada"} == {0.0}


def test_a_row_that_cannot_be_entered_has_no_score_and_no_graded_notebook(
    graded: Path, grade: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no more space")

    monkeypatch.setattr(GradebookEntry, "convert_single_notebook", broken)
    seen: list[Done] = []
    row = {row.student: row for row in grade(graded, seen.append, by=Scripted({}), only="ada").rows}["ada"]
    assert (row.status, row.total) == ("GRADER_ERROR", 0)
    assert [(done.status, done.points) for done in seen] == [("GRADER_ERROR", 0)]  # not the judge's points
    assert {score for student, _, score, *_ in rows(graded / "gradebook.db")[0] if student == "ada"} == {0.0}
    assert not (graded / "autograded" / "ada" / LAB / "small.ipynb").exists()
    assert "no more space" in (graded / "dlo-grade.log").read_text()


def full_quota(*_: object) -> None:
    raise RuntimeError("nbgrader") from OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize("how", ["no space before a row", "a quota ends in a row", "in SQLite"])
def test_on_a_full_disk_the_batch_stops_and_earlier_rows_stay(
    graded: Path, grade: Callable, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    before = rows(graded / "gradebook.db")
    if how == "no space before a row":
        monkeypatch.setattr(batch.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    elif how == "in SQLite":
        error = sqlite3.OperationalError("database or disk is full")
        monkeypatch.setattr(GradebookEntry, "enter", Mock(side_effect=error))
    else:
        monkeypatch.setattr(GradebookEntry, "enter", full_quota)
    seen: list[Done] = []
    with pytest.raises(UserError, match="is full: free some space, then `dlo grade 91_small --resume`"):
        grade(graded, seen.append, by=Scripted({}))
    assert seen == []
    assert rows(graded / "gradebook.db") == before


@pytest.fixture
def changed(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small lab's source in a separate checkout, to be changed."""
    shutil.copytree(checkout, tmp_path / "checkout")
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "checkout"))
    return tmp_path / "checkout" / "solutions" / LAB


def test_a_class_is_graded_again_after_a_check_was_changed(
    graded: Path,
    grade: Callable,
    changed: Path,
) -> None:
    checks = given_folder(changed) / "checks" / "questions.py"
    checks.write_text(checks.read_text() + "\n# stricter\n")
    script = Scripted({})
    grade(graded, by=script, resume=True)
    assert script.asked == [(list(CLASS), 2)]


def test_questions_that_were_changed_after_the_release_are_refused(
    graded: Path, grade: Callable, changed: Path
) -> None:
    """nbgrader's gradebook has no rows for new questions; without the check, points would be lost or counted
    twice.
    """
    hidden = changed / "hidden.py"
    hidden.write_text(hidden.read_text().replace('@check("mean", points=1', '@check("mean", points=4'))
    before = results(graded)
    with pytest.raises(
        UserError, match=r"91_small was changed after its release \(mean\): generate it again"
    ):
        grade(graded, by=Scripted())
    assert results(graded) == before


def test_resuming_judges_only_what_has_changed(graded: Path, grade: Callable, lab: LabSource) -> None:
    reports = {
        path.name: path.stat().st_mtime_ns for path in (graded / "grades" / LAB / "reports").glob("*.json")
    }
    hand_in(graded, "blaise", json.dumps(right(lab)))
    table = grade(graded, resume=True)
    again = [
        name
        for name, then in reports.items()
        if (graded / "grades" / LAB / "reports" / name).stat().st_mtime_ns != then
    ]
    assert [name.split("-")[0] for name in again] == ["blaise"]
    assert {row.student: row.total for row in table.rows}["blaise"] == 12


def test_grading_one_student_again_keeps_the_other_rows(
    undisturbed: Path,
    graded: Path,
    grade: Callable,
) -> None:
    hand_in(graded, "ada", "{")
    seen: list[Done] = []
    table = grade(graded, seen.append, only="ada")
    assert [done.student for done in seen] == ["ada"]
    row = {row.student: row for row in table.rows}
    assert row["ada"].status.startswith("INVALID(damaged")
    assert row["ada"].total == 0  # 12 before: the score of a removed submission does not remain
    before, after = (
        [line for line in results(folder)[0].splitlines() if not line.startswith(b"ada")]
        for folder in (undisturbed, graded)
    )
    assert before == after


def test_after_grading_one_student_the_others_are_not_graded_yet(course: Path, grade: Callable) -> None:
    status = {row.student: row.status for row in grade(course, only="ada").rows}
    assert status.pop("ada").startswith("GRADED")
    assert status.pop("evariste") == "NO_ATTEMPT"
    assert set(status.values()) == {"NOT_GRADED"}


def test_a_student_without_submission_cannot_be_graded_alone(course: Path, grade: Callable) -> None:
    with pytest.raises(UserError, match="evariste has submitted nothing of 91_small"):
        grade(course, only="evariste")
    with pytest.raises(
        UserError, match=r'no student of the roster has the id "blaize": did you mean blaise\?'
    ):
        grade(course, only="blaize")


def test_manual_grades_survive_a_regrade(graded: Path, grade: Callable) -> None:
    with open_course(graded).gradebook as gradebook:
        given = gradebook.find_grade("test_scale", "small", LAB, "blaise")
        given.manual_score, given.needs_manual_grade = 2.5, False
        gradebook.db.commit()
    scores = {row.student: row.scores["scale"] for row in grade(graded, only="blaise").rows}
    assert scores["blaise"] == 2.5
    with open_course(graded).gradebook as gradebook:
        assert gradebook.find_grade(
            "test_scale",
            "small",
            LAB,
            "blaise",
        ).needs_manual_grade  # nbgrader requests another manual review


def test_a_late_submission_gets_the_penalty_of_the_course(graded: Path, grade: Callable) -> None:
    with open_course(graded).gradebook as gradebook:
        gradebook.update_or_create_assignment(LAB, duedate="2026-11-19 12:00:00")
    with open(graded / "nbgrader_config.py", "a") as config:
        config.write("\nc.LateSubmissionPlugin.penalty_method = 'zero'\n")
    row = {row.student: row for row in grade(graded, only="ada").rows}["ada"]
    assert (sum(row.scores.values()), row.penalty, row.total) == (12, 12, 0)


def test_a_second_grader_of_the_same_lab_reports_it_and_stops(course: Path, grade: Callable) -> None:
    script = Scripted()
    with (
        only_grader(course / "grades" / LAB),
        pytest.raises(UserError, match=rf"another grader \(process {os.getpid()}\) is at work"),
    ):
        grade(course, by=script)
    assert script.asked == []
    assert not (course / "grades" / LAB / "results.csv").exists()


@pytest.mark.slow
def test_nbgrader_autograde_refuses_in_one_line_while_another_grader_runs(course: Path) -> None:
    with only_grader(course / "grades" / LAB):
        command = [sys.executable, "-m", "nbgrader", "autograde", LAB]
        done = subprocess.run(
            command,
            cwd=course,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PATH": "/usr/bin:/bin"},
        )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert len(said) == 1
    assert "cannot isolate" in said[0] or "another grader" in said[0]
    assert "Traceback" not in done.stderr
    assert not (course / "autograded").exists()


def test_formgrader_reports_a_missing_sandbox(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise UserError("this host cannot isolate submissions")

    monkeypatch.setattr("dlo_lib.grading.sandbox.isolation.required_isolation", none)
    answer = open_course(course).autograde(LAB, "ada")
    assert not answer["success"]
    assert answer["log"].strip().splitlines()[-1].endswith("this host cannot isolate submissions")
    assert not (course / "autograded").exists()


def test_nbgrader_autograde_holds_the_lock_for_its_whole_run(
    course: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grades, alone = course / "grades" / LAB, []

    def looked(*_: object) -> Report:
        with pytest.raises(UserError, match="another grader"), only_grader(grades):
            pass
        alone.append(True)
        return Report(LAB, GRADED, {})

    with open(course / "nbgrader_config.py", "a") as config:
        config.write("\nc.JudgeCells.unsafe = True\n")
    monkeypatch.setattr("dlo_lib.grading.judge.preprocessor.CourseJudges.judge", looked)
    monkeypatch.setattr("nbgrader.converters.Autograde.set_permissions", looked)  # between two submissions
    answer = open_course(course).autograde(LAB, "[ab]*")
    assert answer["success"], answer["log"]
    assert len(alone) == 2 * len("ab")
    monkeypatch.setattr("nbgrader.converters.Autograde.set_permissions", lambda *_: 1 / 0)
    assert not open_course(course).autograde(LAB, "ada")["success"]
    with only_grader(grades):  # the lock is free after a failed run too
        pass


def renamed(folder: Path) -> None:
    (folder / "small.ipynb").rename(folder / "small (2).ipynb")


def no_notebook(folder: Path) -> None:
    (folder / "small.ipynb").unlink()


def a_pipe(folder: Path) -> None:
    (folder / "small.ipynb").unlink()
    os.mkfifo(folder / "small.ipynb")


def monstrous(folder: Path) -> None:
    """Return 56 MB that need 2 GB of memory to parse."""
    with open(folder / "small.ipynb", "w") as file:
        file.write('{"cells": [')
        for _ in range(80):
            file.write('{"":0},' * 100_000)
        file.write("{}]}")


def a_link_beside_it(folder: Path) -> None:
    (folder / "notes.txt").symlink_to("/etc/passwd")


def a_pipe_beside_it(folder: Path) -> None:
    os.mkfifo(folder / "notes.txt")


def no_time(folder: Path) -> None:
    (folder / "timestamp.txt").write_text("yesterday, in 9999999999 B.C.")


ODD: dict[Callable[[Path], None], str] = {
    renamed: "GRADED_WARN",
    no_notebook: "INVALID",
    a_pipe: "INVALID",
    monstrous: "INVALID(takes far more memory than a notebook does: clear the outputs and submit it again)",
    a_link_beside_it: "GRADED",
    a_pipe_beside_it: "GRADED",
    no_time: "GRADED",
}


def test_unusual_folders_do_not_affect_other_students(
    undisturbed: Path,
    course: Path,
    lab: LabSource,
    grade: Callable,
) -> None:
    for damage in ODD:
        hand_in(course, damage.__name__, json.dumps(right(lab)))
        damage(course / "submitted" / damage.__name__ / LAB)
    table = {row.student: row for row in grade(course).rows}
    for damage, status in ODD.items():
        assert table[damage.__name__].status.startswith(status), damage.__name__
        assert table[damage.__name__].total == (0 if status.startswith("INVALID") else 12)
    honest = [
        line
        for line in results(course)[0].splitlines()
        if line.split(b",")[0].decode() in {*CLASS, "evariste", "student"}
    ]
    assert honest == results(undisturbed)[0].splitlines()
    assert not list((course / "autograded").rglob("notes.txt"))


@pytest.mark.slow
def test_a_lab_whose_reference_solution_fails_grades_no_student(
    course: Path, checkout: Path, grade: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "checkout"
    shutil.copytree(checkout, broken)
    text = broken / "solutions" / LAB / "91_small.py"
    text.write_text(text.read_text().replace("/ 127", "/ 128"))
    monkeypatch.setenv("DLO_COURSE", str(broken))
    with pytest.raises(UserError, match="the reference solution of 91_small does not score full marks"):
        grade(course, by=None)
