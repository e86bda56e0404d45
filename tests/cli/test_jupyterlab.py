"""`dlo lab` in a real browser: lab 00 opens first, another lab opens, a check prints under its cell, the
extensions of nbgrader are loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlo_lib

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip

LABS = Path(dlo_lib.__file__).parents[1] / "labs"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT TESTED HERE: JupyterLab in a browser (install chromium)"
    ),
]


@pytest.fixture
def server(course: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a running `dlo lab` on a course with lab 00."""
    shutil.copytree(LABS / "00_start_here", course / "labs" / "00_start_here")
    command = [sys.executable, "-c", "from dlo_lib.cli import main; main()", "lab", "--no-browser"]
    environment = dict(os.environ, HOME=str(tmp_path / "home"), PYTHONUNBUFFERED="1")
    (tmp_path / "home").mkdir()
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"http://(?:127\.0\.0\.1|localhost):\d+/lab\S*\?token=\w+", line):
            break
    else:
        pytest.fail(f"no URL was printed:\n{said}")
    yield found[0]
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def test_a_student_opens_a_lab_and_runs_a_check(server, tmp_path):
    from playwright.sync_api import expect, sync_playwright

    first, token = server.split("?")
    base, path = first.split("/lab", 1)
    assert path == "/tree/00_start_here/start_here.ipynb"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(server)
        expect(page.get_by_role("heading", name="00 · Start here")).to_be_visible(timeout=60_000)
        page.goto(f"{base}/lab/tree/91_small/small.ipynb?{token}")
        expect(page.locator(".jp-Notebook")).to_be_visible(timeout=60_000)
        expect(page.get_by_text("| Idle")).to_be_visible(timeout=90_000)
        expect(page.get_by_role("menuitem", name="Nbgrader").first).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Validate", exact=True)).to_have_count(0)
        expect(page.get_by_text("Create Assignment", exact=True)).to_have_count(0)
        page.get_by_role("menuitem", name="Run").first.click()
        page.get_by_text("Run All Cells", exact=True).click()
        expect(page.get_by_text("not written yet").first).to_be_visible(timeout=90_000)
        expect(page.get_by_text("Would you like to get notified")).to_have_count(0)
        page.screenshot(path=str(tmp_path / "lab.png"))
        page.goto(f"{base}/lab?{token}")
        page.get_by_role("menuitem", name="Nbgrader").first.click()
        page.get_by_text("Assignment List", exact=True).click()
        expect(page.get_by_text("Released assignments").first).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Error fetching assignments")).to_have_count(0)
        page.screenshot(path=str(tmp_path / "assignments.png"))
        browser.close()
