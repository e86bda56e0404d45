"""Unix users on a real JupyterHub, and what each cannot do; ``test_readme`` takes a class to its grades.

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

from tests.hub.class_on_hub import LAB, ClassOnHub


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
    work = hub.home(ada) / "dlo-labs"
    for folder in (work, course.folder, course.checkout, inbound, hub.settings.folder / "state"):
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
    status, body = hub.get(f"/user/{ada}/optuna/", ada)
    assert (status, b"Create a search first" in body) == (200, True)
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
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
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
