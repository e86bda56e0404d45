"""A class of Unix users on a real JupyterHub, from login to feedback, and what each user cannot do.

`make hub` runs these tests: they need root and a JupyterHub.
"""

from __future__ import annotations

import json
import pwd
import re
import time
from pathlib import Path

import psutil
import pytest

from tests.grading.small_class import right
from tests.hub.browser import CHROMIUM, LONG_MS, assignments, chromium, log_in
from tests.hub.class_on_hub import LAB, PICTURES, ROOT, ClassOnHub


def picture(page, tmp_path: Path, name: str) -> None:
    page.screenshot(path=str(Path(PICTURES or tmp_path) / f"{name}.png"))


def notebook_of(hub: ClassOnHub, name: str) -> Path:
    return hub.home(name) / "dlo-labs" / LAB / "small.ipynb"


@pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED HERE: a Hub in a browser (install chromium)")
def test_a_class_from_login_to_feedback(hub: ClassOnHub, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    from dlo_lib.grading.lab.source import read_lab

    ada, blaise, head = map(hub.person, ("ada", "blaise", "head"))
    with chromium() as browser:
        page = log_in(browser, hub, ada)
        expect(page.get_by_role("heading", name="00 · Start here")).to_be_visible(timeout=LONG_MS)
        picture(page, tmp_path, "opening")
        file = notebook_of(hub, ada)
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

        grader = log_in(browser, hub, head, "/services/deep/lab?formgrader=true")
        frame = grader.frame_locator("iframe").first
        expect(frame.get_by_text(LAB).first).to_be_visible(timeout=LONG_MS)
        picture(grader, tmp_path, "formgrader")
        hub.dlo("deep", "collect", LAB)
        hub.dlo("deep", "grade", LAB)
        hub.dlo("deep", "feedback", LAB)
        grader.goto(f"{hub.url}/services/deep/formgrader/manage_submissions/{LAB}")
        expect(grader.locator("tr", has_text=ada).locator(".score")).to_have_text("12 / 12", timeout=LONG_MS)
        picture(grader, tmp_path, "graded")

        page.reload()
        assignments(page)
        page.get_by_role("button", name="Fetch Feedback").first.click()
        expect(page.get_by_text("View Feedback").first).to_be_visible()
        picture(page, tmp_path, "feedback")
    pages = list((file.parent / "feedback").rglob("small.html"))
    assert len(pages) == 1
    assert "12" in pages[0].read_text()


def test_a_student_opens_nothing_of_another(hub: ClassOnHub) -> None:
    ada, blaise, head = map(hub.person, ("ada", "blaise", "head"))
    course, inbound = hub.settings.course("deep"), hub.settings.exchange / "deep" / "inbound"
    for name in (ada, blaise):
        hub.start_server(name)
    assert hub.get(f"/user/{ada}/api/contents", ada)[0] == 200
    for path in (
        f"/user/{ada}/api/contents",
        f"/user/{ada}/tensorboard/",
        f"/user/{ada}/optuna/",
        "/services/deep/formgrader/",
        "/services/deep/api/contents",
        "/services/other/api/contents",
    ):
        assert hub.get(path, blaise)[0] in (403, 404), path
    assert hub.get("/services/deep/api/contents", head)[0] == 200
    assert hub.get("/services/other/api/contents", head)[0] == 403  # the grader of another course
    home = hub.home(ada)
    for folder in (home, course.folder, course.checkout, inbound, hub.settings.folder / "state"):
        assert hub.run_as(blaise, "ls", str(folder)).returncode != 0, folder
    of_ada = inbound / f"{ada}+{LAB}+2026-01-01 00:00:00 UTC+x"
    assert hub.run_as(ada, "mkdir", str(of_ada)).returncode == 0
    assert hub.run_as(blaise, "mv", str(of_ada), f"{of_ada}y").returncode != 0
    assert hub.run_as(ada, "rmdir", str(of_ada)).returncode == 0


def test_dashboards_open_through_the_hub_and_listen_on_no_port(hub: ClassOnHub) -> None:
    ada = hub.person("ada")
    hub.start_server(ada)
    status, body = hub.get(f"/user/{ada}/tensorboard/", ada)
    assert (status, b"TensorBoard" in body) == (200, True)
    uid = pwd.getpwnam(ada).pw_uid
    mine = [one for one in psutil.process_iter(["uids", "cmdline"]) if one.info["uids"].real == uid]
    boards = [one for one in mine if "dlo_lib.hub.dashboards" in one.info["cmdline"]]
    assert boards
    ports = [
        it.laddr for one in boards for it in one.net_connections("inet") if it.status == psutil.CONN_LISTEN
    ]
    assert ports == []


def test_a_user_has_the_limits_of_the_file(hub: ClassOnHub) -> None:
    ada = hub.person("ada")
    hub.start_server(ada)
    uid = pwd.getpwnam(ada).pw_uid
    servers = [one for one in psutil.process_iter(["uids"]) if one.info["uids"].real == uid]
    limits = Path(f"/proc/{servers[0].pid}/limits").read_text()
    assert re.search(rf"Max processes +{hub.settings.limits.processes} ", limits)
    entries = Path(f"/proc/{servers[0].pid}/cgroup").read_text()
    assert f"/dlo-hub/{ada}" in entries
    groups = [
        group for group in Path("/sys/fs/cgroup").glob(f"**/dlo-hub/{ada}") if (group / "pids.max").exists()
    ]
    assert [(group / "pids.max").read_text().strip() for group in groups] == [
        str(hub.settings.limits.processes)
    ]


def test_a_restart_of_the_hub_loses_no_server(hub: ClassOnHub) -> None:
    ada, blaise = map(hub.person, ("ada", "blaise"))
    hub.start_server(ada)
    started = json.loads(hub.get(f"/user/{ada}/api/status", ada)[1])["started"]
    hub.stop()
    assert hub.run_as(ada, "true").returncode == 0
    hub.start()
    status, body = hub.get(f"/user/{ada}/api/status", ada)
    assert status == 200
    assert json.loads(body)["started"] == started
    assert hub.get(f"/user/{ada}/api/status", blaise)[0] in (403, 404)


def test_a_student_who_leaves_the_roster_loses_the_course(hub: ClassOnHub) -> None:
    ada, blaise = map(hub.person, ("ada", "blaise"))
    script = f"""
from dlo_lib.grading.classroom.nbgrader_course import open_course
with open_course({str(hub.settings.course("deep").folder)!r}).gradebook as gradebook:
    gradebook.remove_student({blaise!r})
"""
    from dlo_lib.hub.folders import as_account

    done = as_account(hub.settings, hub.settings.course("deep"), "-c", script)
    assert done.returncode == 0, done.stderr
    hub.enrol("deep", ada)
    group = hub.settings.course("deep").student_group
    for _ in range(600):
        if hub.api("GET", f"/groups/{group}")["users"] == [ada]:
            return
        time.sleep(0.1)
    pytest.fail(hub.log[-3000:])
