"""The commands of ``deploy/hub/README.md``, typed in a terminal of JupyterLab in Chromium: a class from its
roster to its grades, on a Hub whose accounts are as the README creates them.

`make hub` runs these tests: they need root and a JupyterHub.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlo_lib.cli.doctor_hub import examine_hub
from dlo_lib.hub.folders import write_jupyter_folders
from tests.grading.small_class import right
from tests.hub.browser import CHROMIUM, LONG_MS, assignments, chromium, log_in, picture, terminal
from tests.hub.class_on_hub import LAB, ROOT, ClassOnHub, class_on_hub, missing
from tests.hub.guide import blocks

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT TESTED HERE: a Hub in a browser (install chromium)"
)
COMMAND_S = 900  # a release proves each mistake that was planted, and the machine may have other load
LAB_OF_README = "13_dp_limit"


@pytest.fixture(scope="module")
def hub() -> Iterator[ClassOnHub]:
    """A Hub with a course that is empty, and a grader; nothing is released."""
    if reason := missing():
        pytest.skip(f"NOT TESTED HERE: a real JupyterHub ({reason})")
    with class_on_hub(second=False) as running:
        yield running


@pytest.fixture(scope="module")
def browser(hub: ClassOnHub) -> Iterator[Browser]:
    with chromium() as one:
        yield one


def typed(page: Page, lines: list[str], folder: Path) -> None:
    """Type lines of the README in the open terminal, with the lab of the tests; wait until each succeeds."""
    ready = folder / "ready"
    while not ready.exists():  # what is typed before the shell has started may be lost
        page.keyboard.press("Control+U")
        page.keyboard.type(f"touch {ready}")
        page.keyboard.press("Enter")
        page.wait_for_timeout(1000)
    for line in lines:
        ended = folder / f"ended-{time.monotonic_ns()}"
        for text in (line.replace(LAB_OF_README, LAB), f"echo $? > {ended}"):
            page.keyboard.type(text)
            page.keyboard.press("Enter")
        deadline = time.monotonic() + COMMAND_S
        while not (ended.exists() and ended.read_text().endswith("\n")):
            assert time.monotonic() < deadline, f"{line}: no end"
            page.wait_for_timeout(100)
        assert ended.read_text() == "0\n", line
        ended.unlink()


def test_a_class_from_its_roster_to_its_grades(hub: ClassOnHub, browser: Browser, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    from dlo_lib.grading.lab.source import read_lab

    ada, blaise = map(hub.person, ("ada", "blaise"))
    before, after = blocks("A course")
    course = hub.settings.course("deep").folder
    users = tmp_path / "users.csv"
    users.write_text(f"id,first name,last name,email\n{ada},Ada,L,\n{blaise},Blaise,P,\n")
    grader = log_in(browser, hub, hub.person("head"), "/services/deep/lab")
    with grader.expect_file_chooser() as chooser:
        grader.get_by_role("button", name=re.compile("Upload Files")).click()
    chooser.value.set_files(users)
    expect(grader.locator(".jp-DirListing-item[title^='Name: users.csv']")).to_be_visible()
    terminal(grader)
    typed(grader, before, course)
    picture(grader, tmp_path, "readme_terminal_release")
    assert hub.settings.released("deep") == {LAB}

    page = log_in(browser, hub, ada)
    expect(page.get_by_role("heading", name="00 · Start here")).to_be_visible(timeout=LONG_MS)
    picture(page, tmp_path, "opening")
    file = hub.home(ada) / "dlo-labs" / LAB / "small.ipynb"
    file.write_text(json.dumps(right(read_lab(ROOT / "tests/grading/small_course/solutions" / LAB))))
    assignments(page)
    row = page.locator(".list_item", has_text=LAB).filter(has=page.get_by_role("button", name="Submit"))
    row.get_by_role("button", name="Submit").click()
    expect(page.locator("#submitted_assignments_list").get_by_text(LAB).first).to_be_visible()
    picture(page, tmp_path, "assignments")
    other = log_in(browser, hub, blaise)
    expect(other.get_by_role("heading", name="00 · Start here")).to_be_visible(timeout=LONG_MS)
    assignments(other)
    other.locator(".list_item", has_text=LAB).get_by_role("button", name="Submit").first.click()
    expect(other.locator("#submitted_assignments_list").get_by_text(LAB).first).to_be_visible()

    typed(grader, after, course)
    picture(grader, tmp_path, "readme_terminal_grades")
    assert [line.split(",")[0] for line in (course / "grades.csv").read_text().splitlines()[1:]] == [
        ada,
        blaise,
    ]
    formgrader = log_in(browser, hub, hub.person("head"), "/services/deep/lab?formgrader=true")
    frame = formgrader.frame_locator("iframe").first
    expect(frame.get_by_text(LAB).first).to_be_visible(timeout=LONG_MS)
    picture(formgrader, tmp_path, "formgrader")
    formgrader.goto(f"{hub.url}/services/deep/formgrader/manage_submissions/{LAB}")
    expect(formgrader.locator("tr", has_text=ada).locator(".score")).to_have_text("12 / 12", timeout=LONG_MS)
    picture(formgrader, tmp_path, "graded")

    page.reload()
    assignments(page)
    page.get_by_role("button", name="Fetch Feedback").first.click()
    expect(page.get_by_text("View Feedback").first).to_be_visible()
    picture(page, tmp_path, "feedback")
    pages = list((file.parent / "feedback").rglob("small.html"))
    assert len(pages) == 1
    assert "12" in pages[0].read_text()


def test_a_student_has_the_doctor_in_a_terminal(hub: ClassOnHub, browser: Browser, tmp_path: Path) -> None:
    hub.start_server(hub.person("ada"))
    page = log_in(browser, hub, hub.person("ada"), f"/user/{hub.person('ada')}/lab")
    terminal(page)
    typed(page, ["dlo doctor --hub"], hub.home(hub.person("ada")))
    picture(page, tmp_path, "student_terminal")


def test_no_student_reads_the_work_of_another(hub: ClassOnHub) -> None:
    """Homes are open, as by Debian's default; the course has collected and graded what is closed (above)."""
    ada, blaise = map(hub.person, ("ada", "blaise"))
    home = hub.home(ada)
    assert home.stat().st_mode & 0o777 == 0o755
    assert hub.run_as(blaise, "ls", str(home)).returncode == 0
    copies = list((home / ".local/share/jupyter/nbgrader_cache").rglob("small.ipynb"))
    history = home / ".ipython" / "profile_default" / "history.sqlite"
    for file in (home / "dlo-labs" / LAB / "small.ipynb", home / ".local/state/dlo", *copies):
        assert hub.run_as(ada, "test", "-r", str(file)).returncode == 0
        assert hub.run_as(blaise, "test", "-r", str(file)).returncode != 0, file
    assert copies
    assert hub.run_as(blaise, "test", "-r", str(history)).returncode != 0
    wrong = [found.found for found in examine_hub(hub.settings.file) if not found.ok and found.required]
    assert wrong == []


def test_an_open_workspace_is_closed_by_the_next_start_with_a_word(hub: ClassOnHub) -> None:
    ada = hub.person("ada")
    folder = hub.home(ada) / "dlo-labs"
    hub.stop_server(ada)
    for place in (folder, folder / LAB):
        place.chmod(0o755)
    (named,) = [one for one in examine_hub(hub.settings.file) if one.name == "work of deep"]
    assert not named.ok
    assert f"can read {folder}/" in named.found
    hub.start_server(ada)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert f"closed to other users of this machine (mode 700): {folder}" in hub.log


def test_the_account_of_a_course_refuses_other_logins(hub: ClassOnHub) -> None:
    account = hub.settings.course("deep").account
    done = subprocess.run(["su", "-", account, "-c", "true"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "not available" in done.stdout + done.stderr


def test_the_doctor_finds_a_terminal_that_ends_at_once(hub: ClassOnHub) -> None:
    """The settings of before: JupyterLab starts the shell of the account, which is nologin."""
    file = hub.settings.jupyter_folder("course") / "jupyter_server_config.json"
    settings = json.loads(file.read_text())
    del settings["ServerApp"]["terminado_settings"]
    file.write_text(json.dumps(settings))
    try:
        hub.stop()
        hub.start()
        (found,) = [one for one in examine_hub(hub.settings.file) if one.name == "terminal of deep"]
    finally:
        write_jupyter_folders(hub.settings)
        hub.stop()
        hub.start()
    assert not found.ok
    assert "ends at once" in found.found
    assert "dlo course --hub" in found.cure
    (found,) = [one for one in examine_hub(hub.settings.file) if one.name == "terminal of deep"]
    assert found.ok, found
