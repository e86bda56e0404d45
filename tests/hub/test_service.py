"""The files for an administrator: the service of systemd, nginx in front of it, and that a kit has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dlo_lib.grading.lab.kit import FOLDERS, SUFFIXES
from dlo_lib.hub.extensions import ROLES
from dlo_lib.hub.folders import terminal_command, write_jupyter_folders
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.settings import HubSettings
from tests.hub.guide import README, blocks
from tests.hub.tls import nginx_command

HUB = README.parent
UNIT = HUB / "dlo-hub.service"


@pytest.fixture
def settings(tmp_path: Path) -> HubSettings:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    program = tmp_path / "env" / "bin" / "dlo"
    program.write_text("#!/bin/sh\necho the program of the environment\n")
    program.chmod(0o755)
    return replace(read_settings(HUB / "hub.toml"), environment=tmp_path / "env", folder=tmp_path / "hub")


@pytest.mark.parametrize(
    ("shell", "kept"),
    [
        ("/usr/sbin/nologin", False),
        ("/bin/false", False),
        ("", False),
        ("/opt/absent/zsh", False),
        ("/bin/sh", True),
    ],
)
def test_a_terminal_has_a_shell_and_the_environment(
    settings: HubSettings, tmp_path: Path, shell: str, kept: bool
) -> None:
    """A login shell of Debian sets PATH anew; nologin, the shell of a course's account, ends at once."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SHELL": shell}
    done = subprocess.run(
        terminal_command(settings), input='dlo; echo "$SHELL"', env=variables, capture_output=True, text=True
    )
    expected = ["the program of the environment", shell if kept else "/bin/bash"]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def test_each_role_has_this_terminal(settings: HubSettings) -> None:
    write_jupyter_folders(settings)
    for role in ROLES:
        written = json.loads((settings.jupyter_folder(role) / "jupyter_server_config.json").read_text())
        command = written["ServerApp"]["terminado_settings"]["shell_command"]
        assert command == terminal_command(settings)


def verified(folder: Path, text: str) -> str:
    """What systemd finds wrong in a unit: its program is replaced by one that exists."""
    file = folder / UNIT.name
    file.write_text(text.replace("/opt/dlo/.venv/bin/jupyterhub", "/bin/true"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, env=os.environ
    )
    return done.stderr + ("" if done.returncode == 0 else f"status {done.returncode}")


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="NOT TESTED HERE: the unit of systemd (apt-get install systemd)",
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert verified(tmp_path, text) == ""
    assert "Unknown key" in verified(tmp_path, text.replace("KillMode", "KilMode"))  # it finds faults
    # With systemd's default, a restart of the Hub would end the servers of all students.
    assert "KillMode=process" in text


@pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None,
    reason="NOT TESTED HERE: the configuration of nginx (apt-get install nginx openssl)",
)
def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    command = nginx_command(tmp_path, "hub.test", (8980, 8943), "http://127.0.0.1:8000")
    done = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_kit_has_each_file_that_the_guide_copies() -> None:
    copied = {
        word.removeprefix("/opt/dlo/")
        for heading in ("Install", "As a service")
        for block in blocks(heading)
        for line in block
        for word in line.split()
        if "deploy/hub/" in word
    }
    assert {Path(name).name for name in copied} >= {"hub.toml", "dlo-hub.service", "nginx.conf"}
    for name in copied:
        assert (HUB.parents[1] / name).is_file()
        assert name.split("/")[0] in FOLDERS
        assert Path(name).suffix in SUFFIXES
