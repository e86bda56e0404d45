"""The commands of instructors: their output, and one line with the cure and no change for each error."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from dlo_lib.cli import main
from dlo_lib.grading.classroom.gradebook.export import REPORTS
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.publish.publication import publish
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.judge.report import GRADED, CheckReport, QuestionReport, Report
from dlo_lib.grading.judge.report_store import StoredReport, report_file
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.release import release_lab
from tests.cli.in_process import Dlo, commands

SMALL_COURSE = Path(__file__).resolve().parents[1] / "grading" / "small_course"
NOTEBOOK = '{"cells": [], "metadata": {"dlo": {"lab": "91_small"}}, "nbformat": 4, "nbformat_minor": 5}'
USERS = "Username;First name;Surname\nada;Ada;Lovelace\nchloe;Chloé;[b]Dupont\n"


@pytest.fixture
def dlo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dlo:
    """Run a command in this process."""
    return commands(monkeypatch, capsys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the small lab and an empty course in ``course``. Tests must not change them."""
    root = tmp_path_factory.mktemp("made")
    shutil.copytree(SMALL_COURSE, root, dirs_exist_ok=True)
    with environment({"DLO_COURSE": str(root)}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["dlo", "course", str(root / "course"), "--exchange", str(root / "exchange")]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    return root


@pytest.fixture
def empty(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private copy of the empty course; commands run in it."""
    monkeypatch.setenv("DLO_COURSE", str(made))
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(made / "course", tmp_path / "course", symlinks=True)
    (tmp_path / "exchange").mkdir()
    with open(tmp_path / "course" / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write(f"c.Exchange.root = {str(tmp_path / 'exchange')!r}\n")
    monkeypatch.chdir(tmp_path / "course")
    return tmp_path / "course"


@pytest.fixture
def course(empty: Path) -> Path:
    """The course with the small lab released."""
    lab = find_lab("91", source_labs())
    release_lab(lab)
    publish(open_course(empty), lab)
    return empty


@pytest.fixture
def users(tmp_path: Path) -> Path:
    (tmp_path / "users.csv").write_text(USERS, encoding="utf-8")
    return tmp_path / "users.csv"


@pytest.fixture
def handed_in(tmp_path: Path) -> Path:
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "small [1].ipynb").write_text(NOTEBOOK)
    return tmp_path / "in"


ON_A_LAB = ("release", "collect", "feedback", "export", "similar", "leaderboard")


@pytest.mark.parametrize("command", ON_A_LAB)
def test_outside_a_course_each_command_is_refused_with_the_cure(
    empty: Path, dlo: Dlo, tmp_path: Path, command: str
) -> None:
    assert f"no course in {tmp_path}: make one with `" in dlo(command, "91", "--course", tmp_path).refusal


@pytest.mark.parametrize("command", [*ON_A_LAB, "build", "classroom"])
def test_an_unknown_lab_is_refused_with_the_nearest_name(empty: Path, dlo: Dlo, command: str) -> None:
    assert 'unknown lab "smal": did you mean small?' in dlo(command, "smal").refusal


@pytest.mark.parametrize("command", ["collect", "feedback", "export", "similar", "leaderboard"])
def test_a_lab_that_was_never_released_is_refused(empty: Path, dlo: Dlo, command: str) -> None:
    assert "91_small is not in the gradebook" in dlo(command, "91").refusal


def test_a_roster_is_shown_before_it_is_imported(empty: Path, dlo: Dlo, users: Path) -> None:
    dry = dlo("roster", "import", users, "--dry-run")
    assert dry.status == 0
    assert "[b]Dupont" in dry.out
    assert "2 new, 0 changed, 0 unchanged" in dry.out
    assert "nothing was changed (--dry-run)" in dry.out
    assert "2 new" in dlo("roster", "import", users).out
    assert "0 new, 0 changed, 2 unchanged" in dlo("roster", "import", users).out


def test_a_roster_with_mistakes_is_refused_in_one_line(empty: Path, dlo: Dlo, users: Path) -> None:
    users.write_text(USERS + "ada;Ada;Twice\n;No;Id\n", encoding="utf-8")
    refusal = dlo("roster", "import", users).refusal
    assert "line 4: the id ada is that of line 2; line 5: no id. Nothing was imported" in refusal
    assert "No such file" in dlo("roster", "import", "none.csv").refusal


def test_an_inventory_is_shown_and_counted(course: Path, dlo: Dlo, users: Path, handed_in: Path) -> None:
    dlo("roster", "import", users)
    shown = dlo("collect", "91", "--from", handed_in)
    assert shown.status == 0
    assert "small [1].ipynb (renamed)" in shown.out
    assert "1 received, 1 missing, 1 renamed, 0 late, 0 refused, 0 not in the roster" in shown.out
    inventory = json.loads(dlo("collect", "91", "--from", handed_in, "--json").out)
    assert [(item["student"], item["state"]) for item in inventory["items"]] == [
        ("ada", "UNCHANGED"),
        ("chloe", "MISSING"),
    ]
    assert inventory["items"][0]["sha256"] == sha256(NOTEBOOK.encode()).hexdigest()


def test_students_without_a_notebook_are_named(course: Path, dlo: Dlo, users: Path, handed_in: Path) -> None:
    dlo("roster", "import", users)
    (handed_in / "chloe").mkdir()
    (handed_in / "chloe" / "work.zip").write_bytes(b"PK")
    shown = dlo("collect", "91", "--from", handed_in).out
    assert "received without a notebook that can be read: chloe" in shown
    assert "there are: work.zip" in " ".join(shown.replace("│", " ").split())  # the column may be narrow


def test_invalid_sources_of_submissions_are_refused(
    course: Path, dlo: Dlo, tmp_path: Path, users: Path
) -> None:
    (tmp_path / "moodle.zip").write_bytes(b"no zip")
    assert "the roster of" in dlo("collect", "91", "--from", tmp_path / "moodle.zip").refusal
    dlo("roster", "import", users)
    assert "is not a zip that can be read" in dlo("collect", "91", "--from", tmp_path / "moodle.zip").refusal
    assert "give a folder, or the zip that Moodle made" in dlo("collect", "91", "--from", "nowhere").refusal


def test_grades_go_to_the_terminal_or_to_a_file(course: Path, dlo: Dlo, users: Path, tmp_path: Path) -> None:
    dlo("roster", "import", users)
    shown = dlo("export", "91")
    assert shown.out.splitlines()[1:] == [
        "ada,91_small,0,0,0,0,0,0,0,12,NO_ATTEMPT",
        "chloe,91_small,0,0,0,0,0,0,0,12,NO_ATTEMPT",
    ]
    written = dlo("export", "91", "--to", "moodle", "--out", tmp_path / "grades.csv")
    assert f"2 students in {tmp_path / 'grades.csv'}" in written.out
    assert "chloe,,Chloé,[b]Dupont,,0," in (tmp_path / "grades.csv").read_text(encoding="utf-8")
    unknown = dlo("export", "91", "--to", "excel")
    assert unknown.status == 2
    assert "'moodle', 'csv'" in unknown.err


def test_failed_gradings_have_no_grade_and_are_named(
    course: Path, dlo: Dlo, users: Path, handed_in: Path
) -> None:
    dlo("roster", "import", users)
    dlo("collect", "91", "--from", handed_in)
    exported = dlo("export", "91", "--to", "moodle")
    assert "no points, because grading failed or was not run: ada" in exported.err
    assert "ada,,Ada,Lovelace,,," in exported.out


def test_feedback_before_grading_is_refused(course: Path, dlo: Dlo, users: Path) -> None:
    dlo("roster", "import", users)
    refusal = dlo("feedback", "91").refusal
    assert "no submission of 91_small is graded: `dlo grade 91_small` comes first" in refusal


def test_no_similar_submissions_are_reported(course: Path, dlo: Dlo) -> None:
    assert "no two submissions share more than the exercise explains" in dlo("similar", "91").out
    assert json.loads(dlo("similar", "91", "--json").out) == []


def test_the_leaderboard_shows_what_the_judge_measured_without_names(
    course: Path, dlo: Dlo, users: Path, handed_in: Path, tmp_path: Path
) -> None:
    shutil.copytree(handed_in / "ada", handed_in / "chloe")
    dlo("roster", "import", users)
    dlo("collect", "91", "--from", handed_in)
    said = dlo("leaderboard", "91").out
    assert said.count("it is not graded") == 2
    run = {"commit": "a" * 40, "seed": 0, "config": {"batch": 16}, "data": "0" * 64}
    measured = {"ada": {"scores": [0.8, 0.9], "run": run}, "chloe": {"scores": [0.9, 0.9], "run": {}}}
    for student, values in measured.items():
        check = CheckReport("check_race", "race", 1.0, 1.0, "PASSED", "", "", False, measured=values)
        question = QuestionReport("race", 1.0, 1.0, GRADED, (check,))
        report = StoredReport("key", Report("91_small", GRADED, {"race": question}), True, {})
        report.save(report_file(course / "grades" / "91_small" / REPORTS, student))
    said = dlo("leaderboard", "91").out
    assert "0.8500" in said
    assert "the run has no commit, seed, configuration, data hash" in said
    page = (course / "grades" / "91_small" / "leaderboard.html").read_text(encoding="utf-8")
    assert "0.8500" in page
    for name in ("ada", "chloe"):
        assert name not in said
        assert name not in page
    out = tmp_path / "named.html"
    assert "ada" in dlo("leaderboard", "91", "--names", "--out", out).out
    assert ">ada<" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("standing", [True, False], ids=["in the course", "with --course"])
def test_a_course_is_found_without_the_variable(
    course: Path, dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standing: bool
) -> None:
    """The library is that of a kit, which has no solutions, as in the terminal of a Hub."""
    monkeypatch.delenv("DLO_COURSE")
    monkeypatch.setattr("dlo_lib.__file__", str(tmp_path / "kit" / "dlo_lib" / "__init__.py"))
    (tmp_path / "kit" / "labs").mkdir(parents=True)
    monkeypatch.chdir(course if standing else tmp_path)
    said = dlo("similar", "91", *([] if standing else ["--course", course]))
    assert "no two submissions share more than the exercise explains" in said.out, said.err


def test_a_receipt_equals_the_output_of_sha256sum(empty: Path, dlo: Dlo, handed_in: Path) -> None:
    file = handed_in / "ada" / "small [1].ipynb"
    assert dlo("receipt", file).out == f"{sha256(file.read_bytes()).hexdigest()}  {file}\n"
    assert "no receipt for none.ipynb" in dlo("receipt", "none.ipynb").refusal


def test_a_kit_cannot_be_made_of_a_kit(
    empty: Path, dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kit" / "labs").mkdir(parents=True)
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "kit"))
    assert "a kit is made from an instructor's copy of the course" in dlo("kit").refusal


def test_a_released_lab_is_refused_before_its_proofs(course: Path, dlo: Dlo) -> None:
    assert "91_small is released already" in dlo("release", "91").refusal


def test_an_invalid_exchange_is_refused_before_the_proofs(empty: Path, dlo: Dlo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with open("nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write(f"c.Exchange.root = {str(tmp_path / 'file' / 'exchange')!r}\n")
    refusal = dlo("release", "91").refusal
    assert (
        f"the exchange {tmp_path / 'file' / 'exchange'} cannot be written: "
        f"set c.Exchange.root in {empty / 'nbgrader_config.py'}" in refusal
    )


def test_a_release_that_cannot_be_written_is_refused_before_its_proofs(
    empty: Path, dlo: Dlo, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, allowed = empty, os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and allowed(path, mode))
    refusal = dlo("release", "91").refusal
    assert f"{locked} cannot be written, and a release writes the notebook there" in refusal


def test_labs_are_written_from_their_sources_and_compared(
    empty: Path, dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SMALL_COURSE, tmp_path / "checkout")
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "checkout"))
    before = dlo("build", "--check")
    assert before.status == 1
    assert "small.ipynb is missing: run `make labs`" in before.out
    assert "91_small" in dlo("build").out
    after = dlo("build", "--check", "small")
    assert (after.status, after.out) == (0, "labs/ is in step with solutions/\n")


def test_an_unfinished_lab_does_not_prevent_writing_the_others(
    empty: Path, dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(SMALL_COURSE, root)
    for room in ("labs", "solutions"):
        shutil.copytree(root / room / "91_small", root / room / "90_begun")
    (root / "solutions" / "90_begun" / "91_small.py").unlink()
    toml = root / "labs" / "90_begun" / "lab.toml"
    settings = toml.read_text(encoding="utf-8")
    toml.write_text(settings.replace("91", "90").replace('"small"', '"begun"'), encoding="utf-8")
    monkeypatch.setenv("DLO_COURSE", str(root))
    built = dlo("build")
    assert built.status == 2
    assert "no 90_begun.py in" in built.err
    assert (root / "labs" / "91_small" / "small.ipynb").is_file()


def test_a_check_with_a_syntax_error_is_one_line(
    dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(SMALL_COURSE, root)
    monkeypatch.setenv("DLO_COURSE", str(root))
    (root / "labs" / "91_small" / "checks" / "more.py").write_text("def check(:\n")
    built = dlo("build")
    assert built.status == 2
    assert "more.py is not valid Python: invalid syntax" in built.err


@pytest.mark.slow
def test_a_lab_is_released_only_after_its_proofs(
    empty: Path, dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(SMALL_COURSE, root)
    monkeypatch.setenv("DLO_COURSE", str(root))
    (empty / "solutions").unlink()
    (empty / "solutions").symlink_to(root / "solutions")
    dlo("build")
    assert dlo("build", "--check").status == 0
    mutants = root / "solutions" / "91_small" / "mutants.py"
    text = mutants.read_text()
    mutants.write_text(text.replace("off by up to", "far too small"))
    refused = dlo("release", "91")
    assert refused.status == 2
    assert "✗ mutant the_largest_element_is_taken_without_its_absolute_value: " in refused.out
    assert "should get the message 'far too small', it gets" in refused.out
    assert re.search(r"91_small is not released: 1 of \d+ proofs failed", refused.err)
    assert not (tmp_path / "exchange" / "dlo").exists()
    mutants.write_text(text)
    (root / "labs" / "91_small" / "hidden.py").write_text("x = 1")
    refused = dlo("release", "91", "--prove-only")
    assert "hidden.py must never be released" in refused.out
    assert refused.status == 2
    (root / "labs" / "91_small" / "hidden.py").unlink()
    once = dlo("release", "91", "--prove-only")
    released = dlo("release", "91", "--secrets", "2")
    first, both = (
        int(re.search(r"^91_small: (\d+) proofs hold$", it.out, re.MULTILINE)[1]) for it in (once, released)
    )
    assert both - first == 3 + text.count("    Mutant(")
    assert (tmp_path / "exchange" / "dlo" / "outbound" / "91_small" / "small.ipynb").is_file()
