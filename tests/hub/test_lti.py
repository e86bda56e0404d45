"""Users of a Moodle: which claim becomes the name of the Unix account, and pages in a frame of Moodle."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tornado.web import HTTPError

from dlo_lib.base.errors import UserError
from dlo_lib.hub import accounts, kubernetes, lti
from dlo_lib.hub.folders import write_jupyter_folders
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.settings import HubSettings

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "hub"
CUSTOM = "https://purl.imsglobal.org/spec/lti/claim/custom"


def launch(login: object = "ada") -> dict[str, object]:
    """The claims of a launch, as Moodle sends them."""
    custom = {} if login is None else {CUSTOM: {"login": login}}
    return {"sub": "3", "email": "ada@example.org", "given_name": "Ada", **custom}


@pytest.fixture
def settings(tmp_path: Path) -> HubSettings:
    """A Hub on one machine whose users come from a Moodle."""
    platform = read_settings(EXAMPLES / "kubernetes.toml").lti
    return replace(read_settings(EXAMPLES / "hub.toml"), lti=platform, folder=tmp_path)


def test_the_name_is_the_custom_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_number", {"ada": 1001}.get)
    assert lti.unix_name(launch(), "custom_login") == "ada"


@pytest.mark.parametrize("login", [None, "", "$User.username", 3, ["ada"]])
def test_a_launch_without_the_claim_is_refused_and_not_the_number_taken(login: object) -> None:
    with pytest.raises(UserError, match=r"Moodle sent no custom_login: .* login=\$User\.username"):
        lti.unix_name(launch(login), "custom_login")


@pytest.mark.parametrize("login", ["root", "daemon", "ada@example.org", "../ada", "chloe", "3"])
def test_only_accounts_of_persons_log_in(login: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_number", {"ada": 1001, "root": 0, "daemon": 1, "3": 1003}.get)
    with pytest.raises(UserError, match="no account .* of a person on this machine"):
        lti.unix_name(launch(login), "custom_login")


def test_on_kubernetes_no_login_has_the_name_of_the_account_of_a_course() -> None:
    """A Moodle lets its users choose names in some schools, and the course's pod has the solutions."""
    settings = read_settings(EXAMPLES / "kubernetes.toml")
    config = kubernetes.values(settings)["hub"]["config"]["Authenticator"]
    assert settings.courses
    assert config["blocked_users"] == ["root", *(course.account for course in settings.courses)]
    assert not set(config["blocked_users"]) & set(config["admin_users"])


def test_pages_in_a_frame_of_moodle_keep_their_cookies(settings: HubSettings) -> None:
    found = lti.in_a_frame(settings)
    assert found["cookie_options"] == {"SameSite": "None", "Secure": True}
    policy = {"Content-Security-Policy": "frame-ancestors 'self' https://moodle.example.org"}
    assert found["headers"] == policy
    write_jupyter_folders(settings)
    for role in ("student", "grader", "course"):
        written = json.loads((settings.jupyter_folder(role) / "jupyter_server_config.json").read_text())
        assert written["ServerApp"]["tornado_settings"]["headers"] == policy
    assert lti.in_a_frame(replace(settings, lti=None)) == {}
    write_jupyter_folders(replace(settings, lti=None))
    written = json.loads((settings.jupyter_folder("student") / "jupyter_server_config.json").read_text())
    assert "headers" not in written["ServerApp"]["tornado_settings"]


def test_kubernetes_refuses_a_launch_without_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    values = kubernetes.values(read_settings(EXAMPLES / "kubernetes.toml"))
    assert values["hub"]["config"]["JupyterHub"]["tornado_settings"]["cookie_options"]["Secure"]
    package = ModuleType("ltiauthenticator.lti13.auth")
    package.LTI13Authenticator = object
    for name in ("ltiauthenticator", "ltiauthenticator.lti13"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ltiauthenticator.lti13.auth", package)
    c: Any = SimpleNamespace(
        KubeSpawner=SimpleNamespace(), Spawner=SimpleNamespace(), JupyterHub=SimpleNamespace()
    )
    exec(values["hub"]["extraConfig"]["dlo"], {"c": c})
    login = c.JupyterHub.authenticator_class()
    login.username_key = "custom_login"
    assert login.get_username(launch()) == "ada"
    with pytest.raises(HTTPError, match="403"):
        login.get_username(launch(None))
