"""The opening page has every lab with the minutes and points of its source, and new points after a check."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dlo_lib.grading import Lab
from dlo_lib.grading.lab.course import LAB_FILE, course_root, source_labs
from dlo_lib.grading.lab.declared import declared_points
from dlo_lib.grading.lab.source import source_folder
from dlo_lib.grading.notebook import start_page
from dlo_lib.grading.notebook.progress import read_progress
from dlo_lib.grading.notebook.start_page import StartPage, labs_folder, run_command

FIRST = "00_start_here"


def page() -> StartPage:
    return StartPage(course_root() / "labs")


def points_of(directory: str) -> str:
    (row,) = (row for row in page().rows if row.directory == directory)
    return row.points


def test_every_lab_is_on_the_page_with_its_minutes_and_points() -> None:
    found = [(row.directory, row.minutes, row.core, row.points) for row in page().rows]
    assert found == [
        (lab.directory, lab.minutes, lab.core, f"0 / {sum(declared_points(source_folder(lab)).values()):g}")
        for lab in source_labs()
    ]
    html = page().shown_table().html
    for row in page().rows:
        assert re.search(rf'<a class="dlo-open" href="[^"]*{row.directory}/\w+\.ipynb"', html)


def test_numbers_that_no_lab_has_are_explained() -> None:
    assert start_page.numbers_without_lab([0, 1, 2]) == ""
    assert start_page.numbers_without_lab([1, 2, 5]).endswith("kept for planned labs: 00, 03, 04.")
    text, html = page().shown_table().text, page().shown_table().html
    assert page().without in text
    assert page().without in html


def test_points_appear_after_a_check() -> None:
    lab = Lab(
        {"state_gib": lambda parameters, moments: (2 + moments) * 4 * parameters / 2**30},
        course_root() / "labs" / FIRST,
    )
    assert lab.check("state") == 2
    assert points_of(FIRST) == "2 / 9"
    assert page().next is not None
    assert page().next.directory == FIRST  # its other questions are open
    progress = read_progress(FIRST)
    for question, points in {"mean": 3.0, "quiz": 1.0}.items():
        progress.earned[question] = progress.possible[question] = points
    progress.save()
    assert page().next.directory != FIRST
    assert page().summary[0].startswith("1 of ")


def test_a_lab_without_a_copy_has_no_link(tmp_path: Path) -> None:
    copy = tmp_path / FIRST / "start_here.ipynb"
    copy.parent.mkdir()
    copy.touch()
    few = StartPage(tmp_path)
    assert [row.directory for row in few.rows if row.link] == [FIRST]
    assert few.shown_table().html.count("not fetched") == len(few.rows) - 1


def test_links_begin_at_the_folder_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, name in ((FIRST, "start_here"), ("10_collectives", "collectives")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / f"{name}.ipynb").touch()
    (tmp_path / FIRST / LAB_FILE).touch()
    monkeypatch.chdir(tmp_path / FIRST)
    assert labs_folder() == tmp_path
    shown = StartPage(labs_folder())
    links = {row.directory: row.link for row in shown.rows if row.link}
    assert links == {FIRST: "start_here.ipynb", "10_collectives": "../10_collectives/collectives.ipynb"}
    assert [row.directory for row in shown.rows if row.here] == [FIRST]
    monkeypatch.chdir(tmp_path)
    assert labs_folder() == tmp_path


def test_outside_a_notebook_the_page_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    start_page.start_page()
    printed = capsys.readouterr().out
    assert "Continue with 00 · Start here." in printed
    assert re.search(r"^00 · Start here +core +15 +0 / 9 +not started$", printed, re.MULTILINE)


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_button_runs_its_command_and_reads_the_progress_again(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ipywidgets = pytest.importorskip("ipywidgets")
    ran = []

    def run(*arguments: str, folder: Path) -> str:
        ran.append((arguments, folder))
        assert all(button.disabled for button in buttons._buttons.values())
        return "3 of 6 points\n"

    monkeypatch.setattr(start_page, "run_command", run)
    folder = course_root() / "labs"
    buttons = start_page._Buttons(ipywidgets, page(), folder)
    buttons.after = lambda: ran.append("read again")
    buttons._lab.value = "10_collectives"
    buttons._buttons[command].click()
    assert ran == [((command, "10_collectives"), folder), "read again"]
    assert buttons._output.outputs[0]["text"] == "3 of 6 points\n"
    assert not any(button.disabled for button in buttons._buttons.values())


def test_a_command_runs_where_dlo_is_not_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a kernel
    monkeypatch.setenv("DLO_WORK", str(tmp_path / "none"))
    assert len(json.loads(run_command("labs", "--json", folder=tmp_path))) == len(source_labs())
    assert run_command("submit", "0", folder=tmp_path).startswith("dlo: you have no copy")
