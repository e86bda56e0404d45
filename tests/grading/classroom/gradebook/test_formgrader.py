"""Formgrader in a browser, after a batch: its Autograde button uses the judge, and points by hand stay with
their submission.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlo_lib.cli.jupyter import free_port
from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.export import read_grades
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.judge.client import JudgeClient
from dlo_lib.grading.lab.course import find_lab, source_labs
from tests.grading.small_class import LAB, hand_in, right, small_lab, wrong_scale

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT TESTED HERE: formgrader in a browser (install chromium)"
    ),
]


@pytest.fixture
def course(checkout: Path, graded_class: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graded class in which fanny and blaise have submitted again since."""
    monkeypatch.setenv("DLO_COURSE", str(checkout))
    lab, folder = small_lab(), tmp_path / "course"
    shutil.copytree(graded_class, folder, symlinks=True)
    with open(folder / "nbgrader_config.py", "a") as config:
        config.write("\nc.JudgeCells.unsafe = True\n")
    hand_in(folder, "fanny", json.dumps(wrong_scale(lab)))
    hand_in(folder, "blaise", json.dumps(right(lab)))
    return folder


@pytest.fixture
def formgrader(course: Path, tmp_path: Path) -> Iterator[str]:
    """Return the URL of the server."""
    port = free_port()
    options = [
        f"--port={port}",
        "--no-browser",
        "--allow-root",
        "--IdentityProvider.token=secret",
        f"--ServerApp.root_dir={course}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], cwd=course,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if re.search(r"http://(?:127\.0\.0\.1|localhost):\d+/lab\?token", line):
            break
    else:
        pytest.fail(f"the server did not start:\n{said}")
    with open(tmp_path / "server.log", "wb") as log:
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=log)
        yield f"http://localhost:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        drain.wait(30)


def test_the_autograde_button_uses_the_judge_and_sets_points_by_hand_aside(
    course: Path, formgrader: str, judges: JudgeClient, tmp_path: Path
) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{formgrader}/login?token=secret")
        page.goto(f"{formgrader}/formgrader/manage_submissions/{LAB}")
        fanny = page.locator("tr", has_text="fanny")
        expect(fanny.locator(".status")).to_have_text("needs autograding", timeout=60_000)
        page.screenshot(path=str(tmp_path / "before.png"))
        fanny.locator(".autograde a").click()
        expect(page.get_by_text("Successfully autograded").first).to_be_visible(timeout=120_000)
        page.get_by_role("button", name="OK").click()
        expect(fanny.locator(".status")).to_have_text("graded", timeout=60_000)
        page.screenshot(path=str(tmp_path / "autograded.png"))
        with open_course(course).gradebook as gradebook:
            scores = {
                grade.name: grade.auto_score
                for grade in gradebook.find_submission_notebook("small", LAB, "fanny").grades
            }
            place = gradebook.find_submission_notebook("small", LAB, "blaise").id
            before = gradebook.find_grade("test_scale", "small", LAB, "blaise").auto_score
        expect(fanny.locator(".score")).to_have_text(f"{sum(scores.values()):g} / 12")
        assert scores["test_quantise"] == 4
        assert scores["test_scale"] < 3

        page.goto(f"{formgrader}/formgrader/submissions/{place}")
        expect(page.get_by_text("Status: GRADED")).to_be_visible(timeout=60_000)
        points = page.locator("input.score").first
        # The page saves points only after it has read the grades; it shows them as placeholders then.
        expect(points).to_have_attribute("placeholder", re.compile("[0-9]"), timeout=60_000)
        points.fill("2.5")
        with page.expect_response(
            lambda response: "/api/grade/" in response.url and response.request.method == "PUT"
        ):
            points.press("Tab")
        page.screenshot(path=str(tmp_path / "by_hand.png"), full_page=True)

        page.goto(f"{formgrader}/formgrader/manage_submissions/{LAB}")
        blaise = page.locator("tr", has_text="blaise")
        blaise.locator(".autograde a").click()
        expect(page.get_by_text("Successfully autograded").first).to_be_visible(timeout=120_000)
        page.get_by_role("button", name="OK").click()
        expect(blaise.locator(".status")).to_have_text("needs manual grading", timeout=60_000)
        browser.close()

    with open_course(course).gradebook as gradebook:  # the points were for the submission before
        given = gradebook.find_grade("test_scale", "small", LAB, "blaise")
        assert given.manual_score is None
        assert before < given.auto_score == 3
    table = read_grades(open_course(course), find_lab("91", source_labs()))
    assert "blaise: set aside" in table.notes[0]
    assert "scale 2.5" in table.notes[0]
    kept = Options(only="blaise", unsafe=True, keep_manual=True)
    table = grade_lab(find_lab("91", source_labs()), course, options=kept, judges=judges)
    assert {row.student: row.scores["scale"] for row in table.rows}["blaise"] == 2.5
