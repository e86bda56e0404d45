"""A verdict has its time, and says when it is about another text of its cell than the one in the notebook."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlo_lib.grading.checks.verdict import QuestionVerdict, Shown
from dlo_lib.grading.notebook.cell_runs import CellRun, CellRuns
from dlo_lib.grading.notebook.verdict_age import changed_before, older_verdicts, show_outdated


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    file = tmp_path / "small.ipynb"
    cells = [{"id": "scale", "source": ["x = 1\n", "y = 2"]}, {"id": "test_scale", "source": "lab"}]
    file.write_text(json.dumps({"cells": cells}))
    os.utime(file, (1000, 1000))
    return file


@pytest.mark.parametrize(
    ("text", "began", "edited"),
    [
        ("x = 1\ny = 2", 900, False),  # saved after the run, with the text that ran
        ("x = 1", 900, True),  # saved after the run, with another text
        ("x = 1", 1100, False),  # the notebook was not saved since the run: nothing is known
    ],
)
def test_a_cell_that_was_edited_and_not_run_is_reported(
    notebook: Path, text: str, began: float, edited: bool
) -> None:
    told = changed_before(notebook, "scale", CellRun(text, began))
    assert bool(told) is edited
    assert not told or "has been edited since it ran last" in told


def test_without_a_run_or_a_notebook_nothing_is_reported(notebook: Path) -> None:
    assert changed_before(notebook, "scale", None) == ""
    assert changed_before(notebook.with_name("none.ipynb"), "scale", CellRun("x", 0)) == ""
    notebook.write_text("{")
    assert changed_before(notebook, "scale", CellRun("x", 0)) == ""


def test_after_a_restart_the_verdicts_on_an_earlier_text_are_named(notebook: Path) -> None:
    same = CellRun("x = 1\ny = 2\n", 0).digest
    other = CellRun("x = 1", 0).digest
    assert older_verdicts(notebook, {"scale": (same, 900.0)}) == ""
    assert older_verdicts(notebook, {"scale": (other, 1100.0)}) == ""  # not saved since the check
    assert older_verdicts(notebook, {"gone": (other, 900.0)}) == ""
    assert "verdicts below on `scale` are about" in older_verdicts(notebook, {"scale": (other, 900.0)})


def test_a_run_with_another_text_marks_the_verdict_and_the_old_text_unmarks_it() -> None:
    runs, shown = CellRuns(), []
    display = SimpleNamespace(show=lambda text: shown.append(text))

    def run(text: str, cell: str | None = "scale") -> None:
        runs.begin(SimpleNamespace(raw_cell=text, cell_id=cell))

    run("x = 1")
    judged = runs.last("scale")
    assert judged is not None
    verdict = QuestionVerdict("scale", (), frozenset(), 0, checked="Checked 2026-11-27 09:00:00 UTC.")
    runs.on_run("scale", lambda now: show_outdated(verdict, display, judged, now))
    run("x = 2", cell=None)  # a front end without ids
    run("x = 2", cell="mean")
    run("x = 2")
    run("x = 1\n")
    first, second = shown
    assert isinstance(first, Shown)
    assert first.text.endswith(
        "Checked 2026-11-27 09:00:00 UTC. Its cell has run with another text since: run this check again."
    )
    assert "another text since" in first.html
    assert second.text.endswith("Checked 2026-11-27 09:00:00 UTC.")
    assert "another text" not in second.html
