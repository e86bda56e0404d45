"""`dlo course --hub` and `dlo doctor --hub`: what they refuse, what they write, and the limits of a user."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.usage import run_app
from dlo_lib.cli.app import app
from dlo_lib.hub import folders
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.user_group import user_group

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "hub"


def example(kind: str, tmp_path: Path) -> Path:
    file = tmp_path / "hub.toml"
    text = (EXAMPLES / f"{kind}.toml").read_text(encoding="utf-8")
    folder = read_settings(EXAMPLES / f"{kind}.toml").folder
    file.write_text(text.replace(f'folder = "{folder}" ', f'folder = "{tmp_path / "hub"}" '))
    return file


def test_kubernetes_gets_values_and_the_settings_of_jupyter(tmp_path: Path) -> None:
    run_app(app, "dlo", ["course", "--hub", str(example("kubernetes", tmp_path))])
    assert "singleuser" in json.loads((tmp_path / "hub" / "values.json").read_text())
    for role in ("student", "grader", "course"):
        assert (tmp_path / "hub" / "jupyter" / role / "nbgrader_config.py").is_file()
    assert not (tmp_path / "hub" / "exchange").exists()


def test_a_missing_account_gives_the_command_that_creates_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("dlo_lib.hub.accounts._number", lambda name: None)
    with pytest.raises(UserError, match=r"head in .* has no account here: adduser head"):
        run_app(app, "dlo", ["course", "--hub", str(example("hub", tmp_path))])
    monkeypatch.setattr(folders, "require_accounts", lambda settings: None)
    with pytest.raises(UserError, match=r"no account grader-deep26: useradd --system .* grader-deep26$"):
        run_app(app, "dlo", ["course", "--hub", str(example("hub", tmp_path))])


def test_only_root_prepares_courses(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="sudo dlo course --hub"):
        run_app(app, "dlo", ["course", "--hub", str(example("hub", tmp_path))])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["course"], "name the folder of the course, or give --hub"),
        (["course", "folder", "--hub", "{file}"], "omit folder"),
        (["doctor", "{file}"], "dlo doctor --hub"),
        (["doctor", "--hub", "missing.toml"], "no file missing.toml: copy deploy/hub/hub.toml"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    file = str(example("hub", tmp_path))
    with pytest.raises(UserError, match=said):
        run_app(app, "dlo", [argument.format(file=file) for argument in arguments])


def test_an_interpreter_that_a_user_cannot_reach_is_named() -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: a command as another user (needs root)")
    import pwd

    done = folders.as_user(pwd.getpwnam("daemon"), ["/root/.secret/python"], Path("/"), {})
    assert done.returncode == 126
    assert "daemon cannot run" in done.stderr


def test_the_limits_of_a_user_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    one, two = tmp_path / "v1", tmp_path / "v2"
    for controller in ("memory", "cpu", "pids"):
        (one / controller).mkdir(parents=True)
    (two / "dlo-hub").mkdir(parents=True)
    (two / "cgroup.controllers").write_text("cpu memory pids")
    entries = user_group("ada", 2 << 30, 1.5, 256, one)
    assert entries == [one / name / "dlo-hub" / "ada" / "cgroup.procs" for name in ("pids", "memory", "cpu")]
    assert (one / "memory" / "dlo-hub" / "ada" / "memory.limit_in_bytes").read_text() == str(2 << 30)
    assert (one / "cpu" / "dlo-hub" / "ada" / "cpu.cfs_quota_us").read_text() == "150000"
    assert user_group("ada", 2 << 30, 1.5, 256, two) == [two / "dlo-hub" / "ada" / "cgroup.procs"]
    assert (two / "dlo-hub" / "ada" / "cpu.max").read_text() == "150000 100000"
    assert (two / "dlo-hub" / "ada" / "pids.max").read_text() == "256"
    assert user_group("ada", 1, 1.0, 1, tmp_path / "none") == []
