"""Groups, roles, services and the settings of Jupyter, as data; the service of the groups on a small Hub."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import urllib.error
import urllib.parse
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cli.hub_probe import enabled_extensions
from dlo_lib.hub import kubernetes, rights
from dlo_lib.hub.extensions import ROLES, disabled_in_lab, server_extensions
from dlo_lib.hub.folders import write_jupyter_folders
from dlo_lib.hub.membership import roster_of, synchronise, wanted
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.settings import HubSettings

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "hub"


@pytest.fixture
def settings(tmp_path: Path) -> HubSettings:
    read = read_settings(EXAMPLES / "hub.toml")
    (course,) = read.courses
    course = replace(course, folder=tmp_path / "course")
    course.folder.mkdir()
    return replace(read, folder=tmp_path / "hub", courses=(course,))


def make_roster(settings: HubSettings, *students: str) -> None:
    with sqlite3.connect(settings.courses[0].folder / "gradebook.db") as gradebook:
        gradebook.execute("create table if not exists student (id text)")
        gradebook.execute("delete from student")
        gradebook.executemany("insert into student values (?)", [(one,) for one in students])


def scopes_of(settings: HubSettings, group: str) -> set[str]:
    return {
        scope
        for role in rights.roles(settings)
        if group in role.get("groups", ())
        for scope in role["scopes"]
    }


def test_only_graders_open_formgrader(settings: HubSettings) -> None:
    assert "access:services!service=deep26" in scopes_of(settings, "formgrade-deep26")
    assert scopes_of(settings, "nbgrader-deep26") == set()
    assert rights.groups(settings)["formgrade-deep26"] == {"users": ["head", "assistant"]}


def test_formgrader_runs_as_the_account_on_its_checkout(settings: HubSettings) -> None:
    service = next(one for one in rights.services(settings) if one["name"] == "deep26")
    assert service["user"] == "grader-deep26"
    assert service["url"].startswith("http://127.0.0.1:")
    assert service["environment"]["DLO_COURSE"] == str(settings.courses[0].checkout)


def test_a_server_knows_the_courses_and_the_role_of_its_user(settings: HubSettings) -> None:
    student = rights.user_environment(settings, "ada", {"nbgrader-deep26", "other"})
    assert student["DLO_HUB_COURSES"] == "deep26"
    assert student["JUPYTER_CONFIG_PATH"].endswith("jupyter/student")
    assert rights.user_environment(settings, "ada", set())["DLO_HUB_COURSES"] == ""
    assert rights.user_environment(settings, "head", set())["JUPYTER_CONFIG_PATH"].endswith("jupyter/grader")


def test_idle_ranks_of_a_server_end_after_the_time_of_the_file(
    settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlo_lib.base.ranks_idle import idle_minutes

    for name, value in rights.user_environment(settings, "ada", set()).items():
        monkeypatch.setenv(name, value)
    assert idle_minutes() == settings.limits.ranks_idle.total_seconds() / 60 == 5


def test_the_kernel_of_notebooks_shares_pytorch_with_its_ranks(
    settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jupyter_client.kernelspec import KernelSpecManager

    write_jupyter_folders(settings)
    monkeypatch.setenv("JUPYTER_PATH", settings.server_variables["JUPYTER_PATH"])
    found = KernelSpecManager().get_kernel_spec("python3")
    assert found.argv[:3] == [str(settings.environment / "bin" / "python"), "-m", "dlo_lib.hub.kernel"]


def test_each_role_has_its_parts_of_nbgrader(settings: HubSettings) -> None:
    has = {
        role: {name.rsplit(".")[-1] for name, on in server_extensions(role).items() if on} for role in ROLES
    }
    assert has == {
        "student": {"assignment_list"},
        "grader": {"assignment_list", "course_list"},
        "course": {"formgrader"},
    }
    for role in ROLES:
        off = {name.rsplit(":")[-1].replace("-", "_") for name in disabled_in_lab(role)}
        assert not off & has[role]
        assert off | has[role] >= {"assignment_list", "course_list", "formgrader"}
    write_jupyter_folders(settings)
    course = json.loads((settings.jupyter_folder("course") / "jupyter_server_config.json").read_text())
    assert course["ServerApp"]["tornado_settings"]["headers"] == {
        "Content-Security-Policy": "frame-ancestors 'self'"
    }
    student = json.loads((settings.jupyter_folder("student") / "jupyter_server_config.json").read_text())
    assert all(board["unix_socket"] is True for board in student["ServerProxy"]["servers"].values())
    (style,) = student["ServerApp"]["tornado_settings"]["static_custom_path"]
    assert "word-break: normal" in (Path(style) / "custom.css").read_text()


@pytest.mark.parametrize("role", ROLES)
def test_a_server_loads_the_parts_of_its_role(settings: HubSettings, role: str, monkeypatch) -> None:
    write_jupyter_folders(settings)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(settings.jupyter_folder(role)))
    expected = sorted(name.rsplit(".")[-1] for name, on in server_extensions(role).items() if on)
    assert enabled_extensions() == expected


@pytest.mark.parametrize("role", ["student", "course"])
def test_the_nbgrader_configuration_of_a_role_loads(settings: HubSettings, role: str, monkeypatch) -> None:
    from traitlets.config.loader import PyFileConfigLoader

    monkeypatch.setenv("DLO_HUB_COURSES", "deep26")
    write_jupyter_folders(settings)
    c = PyFileConfigLoader("nbgrader_config.py", path=str(settings.jupyter_folder(role))).load_config()
    assert c.Exchange.root == str(settings.exchange)
    assert c.CourseDirectory.get("course_id", "") == ("deep26" if role == "student" else "")


class SmallHub:
    """A Hub's API in memory; it refuses the user names in ``refused``."""

    def __init__(self, users: set[str], groups: dict[str, set[str]], refused: set[str] = frozenset()) -> None:
        self.users, self.groups, self.refused = users, groups, refused

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        if (method, path) == ("GET", "/groups"):
            return [{"name": name, "users": sorted(members)} for name, members in self.groups.items()]
        if method == "GET":
            return [{"name": name} for name in sorted(self.users)]
        name = urllib.parse.unquote(path.split("/")[2])
        if path.startswith("/users/"):
            if name in self.refused:
                raise urllib.error.HTTPError(path, 400, "no such account", Message(), None)
            self.users.add(name)
            return None
        if path == f"/groups/{name}":
            self.groups[name] = set()
        else:
            assert set(body["users"]) <= self.users
            change = self.groups[name].update if method == "POST" else self.groups[name].difference_update
            change(body["users"])
        return None


def test_groups_become_equal_to_roster_and_graders(settings: HubSettings) -> None:
    make_roster(settings, "Ada", "blaise")
    hub = SmallHub({"gone", "head"}, {"formgrade-deep26": {"gone"}, "untouched": {"gone"}})
    groups, problems = wanted(settings)
    changes = synchronise(hub, groups)
    assert problems == []
    assert hub.groups == {
        "formgrade-deep26": {"head", "assistant"},
        "nbgrader-deep26": {"ada", "blaise"},
        "untouched": {"gone"},
    }
    assert "gone removed from formgrade-deep26" in changes
    assert synchronise(hub, groups) == []
    make_roster(settings, "blaise")
    synchronise(hub, wanted(settings)[0])
    assert hub.groups["nbgrader-deep26"] == {"blaise"}


def test_a_name_that_the_hub_refuses_does_not_stop_the_others(settings: HubSettings) -> None:
    make_roster(settings, "ada", "b?d")
    hub = SmallHub(set(), {}, refused={"b?d"})
    assert "the Hub refuses the names b?d" in synchronise(hub, wanted(settings)[0])
    assert hub.groups["nbgrader-deep26"] == {"ada"}


def test_a_course_without_gradebook_is_named_and_its_group_stays(settings: HubSettings) -> None:
    with pytest.raises(UserError, match=r"no readable gradebook at .*: as root, run: dlo course --hub"):
        roster_of(settings.courses[0])
    groups, problems = wanted(settings)
    assert "nbgrader-deep26" not in groups
    assert len(problems) == 1


def test_the_values_for_kubernetes() -> None:
    settings = read_settings(EXAMPLES / "kubernetes.toml")
    values = json.loads(kubernetes.values_text(settings))
    compile(values["hub"]["extraConfig"]["dlo"], "extraConfig", "exec")
    lti = values["hub"]["config"]["LTI13Authenticator"]
    assert lti["client_id"] == ["AbCdEf123456789"]
    assert (lti["uri_scheme"], lti["username_key"]) == ("https", "custom_login")
    assert values["singleuser"]["storage"]["homeMountPath"] == "/home/dlo"
    assert "access:servers!user=grader-deep26" in values["hub"]["loadRoles"]["formgrade-deep26"]["scopes"]
    assert values["singleuser"]["image"] == {"name": "registry.example.org/dlo-hub", "tag": "1"}
    assert values["hub"]["config"]["JupyterHub"]["load_groups"]["nbgrader-deep26"] == {
        "users": ["ada", "blaise"]
    }


def test_each_pod_has_a_separate_unix_id_and_the_role_of_its_user() -> None:
    from types import SimpleNamespace

    settings = read_settings(EXAMPLES / "kubernetes.toml")
    c = SimpleNamespace(KubeSpawner=SimpleNamespace(), Spawner=SimpleNamespace())
    exec(kubernetes.values(replace(settings, lti=None))["hub"]["extraConfig"]["dlo"], {"c": c})

    def pod(number: int, name: str, *groups: str) -> Any:
        user = SimpleNamespace(id=number, name=name, groups=[SimpleNamespace(name=one) for one in groups])
        spawner = SimpleNamespace(user=user, environment={})
        c.KubeSpawner.pre_spawn_hook(spawner)
        return spawner

    ada, head = pod(1, "ada", "nbgrader-deep26"), pod(2, "head", "formgrade-deep26")
    account = pod(3, "grader-deep26", "formgrade-deep26")
    assert [c.KubeSpawner.uid(one) for one in (ada, head)] == [20_001, 20_002]
    roles = [one.environment["JUPYTER_CONFIG_PATH"].rsplit("/")[-1] for one in (ada, head, account)]
    assert roles == ["student", "grader", "course"]
    assert account.working_dir == "/srv/hub/courses/deep26"
    assert {one.environment["HOME"] for one in (ada, head, account)} == {"/home/dlo"}


@pytest.mark.parametrize("name", [rights.MEMBERSHIP, rights.IDLE])
def test_a_service_of_the_hub_imports_nothing_of_the_current_folder(
    settings: HubSettings, tmp_path: Path, name: str
) -> None:
    """It runs as root. The test runs the first line of its code, which sets the path, and an import."""
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the current folder')\n")
    command = next(one["command"] for one in rights.services(settings) if one["name"] == name)
    assert command[1] == "-I"
    path, _ = command[3].split("\n")
    done = subprocess.run(
        [*command[:3], f"{path}\nimport random, dlo_lib"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
