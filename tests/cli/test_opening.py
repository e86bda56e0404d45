"""`dlo lab` opens lab 00, its file browser shows the notebook of a lab, and `dlo submit` submits it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

import dlo_lib
from dlo_lib.base.errors import UserError
from dlo_lib.cli import submission
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.hand_in import hand_in, has_assignment
from dlo_lib.cli.jupyter import HIDDEN_FILES, nbgrader_environment, start_url, write_jupyter_config
from dlo_lib.cli.machine import shown_findings
from dlo_lib.cli.reports import record_report, show_report
from dlo_lib.cli.submission import submit_lab
from dlo_lib.cli.workspace import update_workspace, work_dir
from dlo_lib.grading.judge.report import GRADED, NO_ATTEMPT, QuestionReport, Report
from dlo_lib.grading.lab.course import course_root
from dlo_lib.grading.lab.exchange import ClassExchange
from dlo_lib.grading.notebook.progress import read_progress

LABS = Path(dlo_lib.__file__).parents[1] / "labs"


def test_lab_00_opens_first(course: Path) -> None:
    update_workspace()
    assert start_url(work_dir()) == "/lab"
    shutil.copytree(LABS / "00_start_here", course / "labs" / "00_start_here")
    assert start_url(work_dir()) == "/lab"  # no copy yet
    update_workspace()
    assert start_url(work_dir()) == "/lab/tree/00_start_here/start_here.ipynb"


def test_the_file_browser_lists_the_notebook_and_readable_modules(course: Path) -> None:
    update_workspace()
    files = {path.name for path in (work_dir() / "91_small").iterdir()}
    assert {"small.ipynb", "lab.toml", "references.json"} <= files
    assert not {name for name in files - set(HIDDEN_FILES) if not name.endswith((".ipynb", ".py", "checks"))}
    config = write_jupyter_config(work_dir(), ClassExchange(None))
    server, lab = (
        json.loads((config / f"jupyter_{name}_config.json").read_text()) for name in ("server", "lab")
    )
    (style,) = server["ServerApp"]["tornado_settings"]["static_custom_path"]
    assert "word-break: normal" in (Path(style) / "custom.css").read_text()
    assert lab == {"LabApp": {"custom_css": True}}
    settings = json.loads((config / "labconfig" / "default_setting_overrides.json").read_text())
    browser = settings["@jupyterlab/filebrowser-extension:browser"]
    assert browser == {
        "navigateToCurrentDirectory": True, "sortNotebooksFirst": True, "showLastModifiedColumn": False,
    }  # fmt: skip


@pytest.fixture
def exchange(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The exchange of a class that has released the lab, as `dlo lab` has it in its settings."""
    monkeypatch.setenv("HOME", str(tmp_path))  # nbgrader keeps a copy of what was submitted there
    update_workspace()
    folder = tmp_path / "exchange"
    for box in ("outbound/91_small", "inbound"):
        (folder / "dlo" / box).mkdir(parents=True)
    shutil.copy(work_dir() / "91_small" / "small.ipynb", folder / "dlo" / "outbound" / "91_small")
    write_jupyter_config(work_dir(), ClassExchange(folder))
    return folder


def test_a_lab_is_submitted_through_the_exchange(exchange: Path) -> None:
    (work_dir() / "html.py").write_text("raise SystemExit('a module of the student')")
    assert submit_lab("small") == work_dir() / "91_small" / "small.ipynb"
    (submitted,) = (exchange / "dlo" / "inbound").iterdir()
    assert "+91_small+" in submitted.name
    assert (submitted / "small.ipynb").read_bytes() == (work_dir() / "91_small" / "small.ipynb").read_bytes()


def test_nbgrader_says_why_it_refuses(exchange: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: each start of nbgrader costs a second."""
    folder = work_dir()
    for name, value in nbgrader_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    released = exchange / "dlo" / "outbound" / "91_small"
    shutil.copy(released / "small.ipynb", released / "second.ipynb")
    (folder / "nbgrader_config.py").write_text("c = get_config()\nc.ExchangeSubmit.strict = True\n")
    refused = hand_in("91_small")
    assert refused["released"]
    assert "second.ipynb: MISSING" in refused["error"]
    shutil.rmtree(released)
    refused = hand_in("91_small")
    assert not refused["released"]
    assert "Assignment not found" in refused["error"]
    assert not has_assignment(exchange, "", "91_small")
    assert list((exchange / "dlo" / "inbound").iterdir()) == []


@pytest.mark.parametrize(
    ("status", "printed", "complained", "says"),
    [
        (0, '{"released": false, "error": "not found"}', "", "no exchange of a class has 91_small: hand in "),
        (0, '{"released": true, "error": "no space\\n/x"}', "", "did not submit 91_small: no space /x$"),
        (1, "", "Traceback ...\nMemoryError\n", "did not submit 91_small: MemoryError$"),
        (1, "", "", "nbgrader did not submit 91_small: no output"),
    ],
)
def test_a_submission_that_fails_says_why(
    course: Path, monkeypatch: pytest.MonkeyPatch, status: int, printed: str, complained: str, says: str
) -> None:
    update_workspace()
    done = subprocess.CompletedProcess([], status, printed, complained)
    monkeypatch.setattr(submission.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match=says):
        submit_lab("small")


def test_a_folder_with_another_name_is_not_submitted(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_workspace()
    shutil.copytree(work_dir() / "91_small", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(UserError, match="is not in a folder 91_small: move it there"):
        submit_lab("small")


def test_the_report_of_a_check_becomes_progress() -> None:
    mean = QuestionReport("mean", 2.0, 3.0, "OK", ())
    record_report(Report("00_start_here", NO_ATTEMPT, {"mean": mean}))
    assert read_progress("00_start_here").earned == {}
    record_report(Report("00_start_here", GRADED, {"mean": mean}))
    progress = read_progress("00_start_here")
    assert (progress.earned, progress.possible) == ({"mean": 2.0}, {"mean": 3.0})


def test_a_notebook_without_an_attempt_names_the_notebook_that_it_was_compared_with(course: Path) -> None:
    terminal = Console(record=True, width=200, file=io.StringIO())
    assert not show_report(Report("91_small", NO_ATTEMPT, {}), terminal)
    told = " ".join(terminal.export_text().split())
    assert f"No answer differs from those of the released notebook in {course_root()}/labs/91_small." in told
    assert f"move the notebook to {work_dir()}/91_small" in told
    assert not show_report(Report("91_small", GRADED, {}), terminal)
    assert "No answer" not in terminal.export_text()


def test_a_missing_part_is_shown_with_its_cure() -> None:
    torch = Diagnosis("torch", True, "2.13", required=True)
    ranks = Diagnosis("ranks", False, "no <name>", "set it", required=True)
    gpu = Diagnosis("gpu", False, "none", "nothing to do")
    assert shown_findings([torch, gpu]).text.startswith("This machine can run the labs.\n✓  torch")
    shown = shown_findings([torch, ranks, gpu])
    assert shown.text.startswith("The labs cannot run yet: see the cure for ranks.")
    assert "set it" in shown.html
    assert "no &lt;name&gt;" in shown.html
