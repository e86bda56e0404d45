"""`dlo doctor --hub` on a real Hub: nothing is wrong at first, and each planted fault is named with its cure.

`make hub` runs these tests; the judgement of an Assignment List is tested without a Hub as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.doctor_hub import examine_hub, token_of
from dlo_lib.cli.doctor_hub_lists import judge_list
from dlo_lib.hub.folders import as_account
from dlo_lib.hub.membership import HubApi
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.rights import STUDENT_SCOPES, user_environment
from dlo_lib.hub.settings import HubSettings
from tests.hub.class_on_hub import DLO, LAB, ClassOnHub

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "hub" / "hub.toml"
OWN = "/home/ada/.jupyter/nbgrader_config.py"
Fault = Callable[[ClassOnHub], AbstractContextManager[object]]


@pytest.fixture
def settings(tmp_path: Path) -> HubSettings:
    """A Hub with one released lab in its exchange."""
    (tmp_path / "exchange" / "deep26" / "outbound" / LAB).mkdir(parents=True)
    return replace(read_settings(EXAMPLE), folder=tmp_path)


def configuration(file: str, exchange: str = "", plugin: str = "", error: str = "") -> dict[str, str]:
    return {"file": file, "exchange": exchange, "plugin": plugin, "error": error}


def answer(settings: HubSettings, own: dict[str, str] | None = None, **different: Any) -> dict[str, Any]:
    """What the probe finds on a right Hub, but with the user's configuration ``own``, and ``different``."""
    plugin = "nbgrader.auth.JupyterHubAuthPlugin"
    of_hub = str(settings.jupyter_folder("student") / "nbgrader_config.py")
    return {
        "labs": [["deep26", LAB]],
        "closed": [],
        "error": "",
        "exchange": str(settings.exchange),
        "plugin": plugin,
        "extensions": ["assignment_list"],
        "configurations": [
            *([own] if own else []),
            configuration(of_hub, str(settings.exchange), plugin),
        ],
    } | different


def test_a_right_list_is_right(settings: HubSettings) -> None:
    found = judge_list(settings, "ada", ["deep26"], answer(settings), "list")
    assert (found.ok, found.found) == (True, "ada sees 1 labs")


@pytest.mark.parametrize(
    ("different", "said", "cure"),
    [
        ({"labs": []}, f"ada does not see {LAB} of deep26", "chmod -R o\\+rX .*outbound"),
        (
            {"labs": [["deep26", LAB], ["law", "x"]]},
            "sees the course law without being in it",
            "nbgrader-law",
        ),
        ({"labs": None, "error": "status code of: 403"}, "fails: status code of: 403", "server_token_scopes"),
        ({"plugin": ""}, "would see the labs of all courses", "c.Authenticator.plugin_class"),
        ({"closed": [["deep26", LAB]]}, f"ada sees {LAB} of deep26 and cannot read it", "chmod -R o\\+rX"),
        (
            {"exchange": "/tmp/x", "own": configuration(OWN, exchange="/tmp/x")},
            'ada has the exchange "/tmp/x"$',
            f"remove c.Exchange.root from {OWN}",
        ),
        (
            {"own": configuration(OWN, exchange="/tmp/x")},
            'has the exchange "/tmp/x" in a shell outside the Hub',
            f"remove c.Exchange.root from {OWN}",
        ),
        (
            {"own": configuration(OWN, error="SyntaxError: invalid syntax")},
            f"nbgrader cannot read {OWN} of ada: SyntaxError",
            f"remove {OWN}",
        ),
        (
            {"extensions": ["assignment_list", "formgrader"]},
            "wrong parts of nbgrader: formgrader",
            "jpserver_extensions",
        ),
    ],
)
def test_a_wrong_list_names_its_reason(settings: HubSettings, different: dict, said: str, cure: str) -> None:
    found = judge_list(settings, "ada", ["deep26"], answer(settings, **different), "list")
    assert not found.ok
    assert re.search(said, found.found)
    assert re.search(cure, found.cure)


def test_a_user_without_course_is_named(settings: HubSettings) -> None:
    found = judge_list(settings, "zoe", [], answer(settings, labs=[]), "list")
    assert 'no course: "You do not have access to this course"' in found.found


def test_without_a_hub_the_message_names_the_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUPYTERHUB_API_TOKEN", raising=False)
    with pytest.raises(UserError, match=r"its administrator names the file: dlo doctor --hub hub\.toml"):
        examine_hub(None)


def wrong(hub: ClassOnHub) -> list[Diagnosis]:
    return [finding for finding in examine_hub(hub.settings.file) if not finding.ok]


def test_nothing_is_wrong_on_a_right_hub(hub: ClassOnHub) -> None:
    # The course other has neither graders nor students: a warning, not a fault.
    assert [finding for finding in wrong(hub) if finding.required] == []


@contextlib.contextmanager
def mode(path: Path, number: int) -> Iterator[None]:
    before = path.stat().st_mode & 0o7777
    path.chmod(number)
    try:
        yield
    finally:
        path.chmod(before)


@contextlib.contextmanager
def owner_root(path: Path) -> Iterator[None]:
    before = path.stat()
    os.chown(path, 0, 0)
    try:
        yield
    finally:
        os.chown(path, before.st_uid, before.st_gid)
        path.chmod(before.st_mode & 0o7777)  # chown removes the set-group-ID bit


@contextlib.contextmanager
def moved(path: Path) -> Iterator[None]:
    aside = path.with_name(f"{path.name}-aside")
    shutil.move(path, aside)
    try:
        yield
    finally:
        shutil.move(aside, path)


@contextlib.contextmanager
def own_config(hub: ClassOnHub, text: str, place: str = ".jupyter") -> Iterator[None]:
    """A configuration of the student, in a folder of the home."""
    folder = hub.home(hub.person("ada")) / place
    folder.mkdir(exist_ok=True)
    for path in (folder, folder.parent):
        shutil.chown(path, hub.person("ada"))
    file = folder / "nbgrader_config.py"
    file.write_text(f"c = get_config()\n{text}\n")
    file.chmod(0o644)
    try:
        yield
    finally:
        file.unlink()


@contextlib.contextmanager
def out_of_group(hub: ClassOnHub, group: str, user: str) -> Iterator[None]:
    file = str(hub.settings.file.resolve())
    (membership,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if file in (one.info["cmdline"] or ()) and "dlo_lib.hub.membership" in " ".join(one.info["cmdline"])
    ]
    membership.suspend()  # it mends the group within a minute
    try:
        hub.api("DELETE", f"/groups/{group}/users", {"users": [user]})
        yield
    finally:
        membership.resume()
        hub.api("POST", f"/groups/{group}/users", {"users": [user]})


@contextlib.contextmanager
def formgrader_for_students(hub: ClassOnHub) -> Iterator[None]:
    file = hub.settings.jupyter_folder("student") / "jupyter_server_config.json"
    before = file.read_text()
    file.write_text(before.replace('formgrader": false', 'formgrader": true'))
    try:
        yield
    finally:
        file.write_text(before)


@contextlib.contextmanager
def without_plugin(hub: ClassOnHub) -> Iterator[None]:
    """Two courses, and nbgrader's default: each student sees all of them."""
    hub.release("other")
    file = hub.settings.jupyter_folder("student") / "nbgrader_config.py"
    before = file.read_text()
    file.write_text("".join(line for line in before.splitlines(True) if "plugin_class" not in line))
    try:
        yield
    finally:
        file.write_text(before)


@contextlib.contextmanager
def name_of_the_account(hub: ClassOnHub) -> Iterator[None]:
    """The roster has the Unix account of The Littlest JupyterHub in place of the Hub's name."""
    with stranger(hub):
        change(hub, "add_student", f"jupyter-{hub.person('zoe')}")
        try:
            yield
        finally:
            change(hub, "remove_student", f"jupyter-{hub.person('zoe')}")


@contextlib.contextmanager
def stranger(hub: ClassOnHub) -> Iterator[None]:
    """A user of the Hub who is on no roster."""
    if hub.person("zoe") not in {user["name"] for user in hub.api("GET", "/users")}:
        hub.api("POST", f"/users/{hub.person('zoe')}", {})
    yield


@contextlib.contextmanager
def with_capitals(hub: ClassOnHub) -> Iterator[None]:
    change(hub, "add_student", "Zoe")
    try:
        yield
    finally:
        change(hub, "remove_student", "Zoe")


def change(hub: ClassOnHub, method: str, student: str) -> None:
    script = (
        "from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course\n"
        f"with open_course('.').gradebook as gradebook: gradebook.{method}({student!r})\n"
    )
    done = as_account(hub.settings, hub.settings.course("deep"), "-c", script)
    assert done.returncode == 0, done.stderr


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "the exchange is not writable": (
        lambda hub: mode(hub.settings.exchange, 0o755),
        "has the mode 755 instead of 1777",
        "chmod 1777",
    ),
    "students list the submissions": (
        lambda hub: mode(hub.settings.exchange / "deep" / "inbound", 0o3777),
        "can list the submissions",
        "chmod 3733",
    ),
    "a folder of the exchange has another owner": (
        lambda hub: owner_root(hub.settings.exchange / "deep" / "outbound"),
        "belongs to root instead of",
        "chown",
    ),
    "students read the solutions": (
        lambda hub: mode(hub.settings.course("deep").checkout, 0o755),
        "can read",
        "chmod 700",
    ),
    "the gradebook is missing": (
        lambda hub: moved(hub.settings.course("deep").folder / "gradebook.db"),
        "has no gradebook in",
        "dlo course --hub",
    ),
    "the checkout is missing": (
        lambda hub: moved(hub.settings.course("deep").checkout),
        "there is no",
        "git clone URL",
    ),
    "a student has another exchange": (
        lambda hub: own_config(hub, "c.Exchange.root = '/tmp'"),
        'has the exchange "/tmp"',
        "/.jupyter/nbgrader_config.py",
    ),
    "a folder of labs has another exchange": (
        lambda hub: own_config(hub, "c.Exchange.root = '/tmp'", "dlo-labs"),
        'has the exchange "/tmp"',
        "/dlo-labs/nbgrader_config.py",
    ),
    "a student's configuration is damaged": (
        lambda hub: own_config(hub, "c.Exchange.root ="),
        "nbgrader cannot read",
        "/.jupyter/nbgrader_config.py",
    ),
    "a released lab is not readable": (
        lambda hub: mode(hub.settings.outbound("deep") / LAB / "small.ipynb", 0o600),
        f"sees {LAB} of deep and cannot read it",
        "chmod -R o+rX",
    ),
    "a student sees all courses": (
        lambda hub: own_config(hub, "c.Authenticator.plugin_class = 'nbgrader.auth.base.NoAuthPlugin'"),
        "would see the labs of all courses",
        "JupyterHubAuthPlugin",
    ),
    "formgrader is on for students": (
        formgrader_for_students,
        "wrong parts of nbgrader: formgrader",
        "dlo course --hub",
    ),
    "a student is not in the group": (
        lambda hub: out_of_group(hub, "nbgrader-deep", hub.person("ada")),
        "should be in the group and is not",
        "dlo-membership",
    ),
    "a grader may not open formgrader": (
        lambda hub: out_of_group(hub, "formgrade-deep", hub.person("head")),
        "may not open it",
        "formgrade-deep",
    ),
    "a user is on no roster": (stranger, "is on no roster and sees no labs", "dlo roster import"),
    "an id with capitals": (with_capitals, 'the id "Zoe" has capital letters', "lower case"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, hub: ClassOnHub) -> None:
    plant, said, cure = FAULTS[fault]
    with plant(hub):
        named = [finding for finding in wrong(hub) if said in finding.found]
    assert named, fault
    assert cure in named[0].cure


def stranger_sees_all_courses(hub: ClassOnHub) -> bool:
    with stranger(hub):
        done = in_server_of(hub, hub.person("zoe"), "-m", "dlo_lib.cli.hub_probe")
    return json.loads(done.stdout)["labs"] == [["deep", LAB], ["other", LAB]]


def has_formgrader_at_the_own_server(hub: ClassOnHub) -> bool:
    ada = hub.person("ada")
    hub.stop_server(ada)
    hub.start_server(ada)
    status = hub.get(f"/user/{ada}/formgrader/", ada)[0]
    hub.stop_server(ada)
    return status != 404


def sees_no_lab(hub: ClassOnHub) -> bool:
    done = in_server_of(hub, hub.person("ada"), "-m", "dlo_lib.cli.hub_probe")
    return json.loads(done.stdout)["labs"] == []


def only_zoe_may_not_fetch(hub: ClassOnHub) -> bool:
    def is_refused(name: str) -> bool:
        command = ["-m", "nbgrader", "fetch_assignment", LAB, "--course", "deep"]
        done = in_server_of(hub, hub.person(name), *command)
        return "You do not have access to this course" in done.stderr

    return is_refused("zoe") and not is_refused("ada")


ISSUES: dict[int, tuple[Fault, Callable[[ClassOnHub], bool], str, str]] = {
    733: (
        without_plugin,
        stranger_sees_all_courses,
        "would see the labs of all courses",
        "/jupyter/student/nbgrader_config.py",
    ),
    1034: (
        formgrader_for_students,
        has_formgrader_at_the_own_server,
        "wrong parts of nbgrader: formgrader",
        "dlo course --hub",
    ),
    1378: (
        lambda hub: mode(hub.settings.outbound("deep"), 0o700),
        sees_no_lab,
        "has the mode 700 instead of 755",
        "chmod 755",
    ),
    1936: (
        name_of_the_account,
        only_zoe_may_not_fetch,
        "which is the user's Unix account on The Littlest JupyterHub",
        "in place of jupyter-",
    ),
}
"""Issue of nbgrader → how a site comes to it, what its users see, and what the doctor says."""


@pytest.mark.parametrize("issue", ISSUES)
def test_an_issue_of_nbgrader_is_reproduced_and_named(issue: int, hub: ClassOnHub) -> None:
    plant, seen, said, cure = ISSUES[issue]
    if issue != 1936:  # before, zoe is on no roster either
        assert not seen(hub)
    with plant(hub):
        assert seen(hub)
        named = [finding for finding in wrong(hub) if said in finding.found]
    assert named
    assert cure in named[0].cure


def test_faults_of_formgrader_are_named(hub: ClassOnHub) -> None:
    file = hub.settings.jupyter_folder("course") / "jupyter_server_config.json"
    config = hub.settings.jupyter_folder("course") / "nbgrader_config.py"
    before, before_config = file.read_text(), config.read_text()
    try:
        file.write_text(before.replace('formgrader": true', 'formgrader": false'))
        hub.stop()
        (down,) = [finding for finding in wrong(hub) if finding.name == "hub"]
        assert "no Hub answers" in down.found
        hub.start()
        assert "404: the account" in " ".join(finding.found for finding in wrong(hub))
        file.write_text(before)
        config.write_text(
            before_config + 'c.Authenticator.plugin_class = "nbgrader.auth.JupyterHubAuthPlugin"\n'
        )
        hub.stop()
        hub.start()
        (button,) = [finding for finding in wrong(hub) if finding.name == "formgrader of deep"]
        assert "remove c.Authenticator.plugin_class" in button.cure
    finally:
        file.write_text(before)
        config.write_text(before_config)
        hub.stop()
        hub.start()


def in_server_of(hub: ClassOnHub, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the rights and the variables of the server of a user."""
    groups = set(hub.api("GET", f"/users/{name}")["groups"])
    api = HubApi(f"{hub.url}/hub/api", hub.api.token)
    with token_of(api, name, STUDENT_SCOPES) as token:
        variables = user_environment(hub.settings, name, groups)
        variables |= {"JUPYTERHUB_API_TOKEN": token, "JUPYTERHUB_API_URL": api.url, "JUPYTERHUB_USER": name}
        command = [f"{key}={value}" for key, value in variables.items()]
        return hub.run_as(name, "/usr/bin/env", *command, str(hub.environment / "bin" / "python"), *arguments)


def doctor_of(hub: ClassOnHub, name: str) -> tuple[int, list[dict[str, Any]]]:
    """Run `dlo doctor --hub` in the server of a user."""
    done = in_server_of(hub, name, *DLO, "doctor", "--hub", "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_student_learns_what_is_missing(hub: ClassOnHub) -> None:
    status, found = doctor_of(hub, hub.person("ada"))
    assert (status, [one["name"] for one in found if not one["ok"]]) == (0, [])
    assert found[-1]["found"] == f"released to you: {LAB}"
    zoe = hub.person("zoe")
    if zoe not in {user["name"] for user in hub.api("GET", "/users")}:
        hub.api("POST", f"/users/{zoe}", {})
    status, found = doctor_of(hub, zoe)
    assert status == 1
    assert "You do not have access to this course" in found[0]["found"]
    assert f"add the id {zoe} to the roster" in found[0]["cure"]
    with own_config(hub, "c.Exchange.root = '/nowhere'"):
        status, found = doctor_of(hub, hub.person("ada"))
    assert status == 1
    assert "remove " in found[-1]["cure"]
    assert ".jupyter/nbgrader_config.py" in found[-1]["cure"]
