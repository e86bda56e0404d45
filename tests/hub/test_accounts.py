"""The Unix accounts of a class in one command: `dlo roster accounts`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.usage import run_app
from dlo_lib.cli.app import app
from dlo_lib.hub import accounts
from dlo_lib.hub.accounts import create_accounts, require_accounts
from dlo_lib.hub.read_settings import read_settings

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "hub" / "hub.toml"
Ran = list[tuple[list[str], str]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """What would change the machine, as root; useradd refuses the name "refused"."""
    found: Ran = []

    def run(command: list[str], input: str, **options: object) -> subprocess.CompletedProcess[str]:
        found.append((command, input))
        refused = command[-1] == "refused"
        return subprocess.CompletedProcess(command, int(refused), "", "useradd: no space left" * refused)

    monkeypatch.setattr(accounts.subprocess, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(accounts, "_number", {"blaise": 1001, "root": 0, "games": 5}.get)
    return found


def test_only_missing_accounts_are_created(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "passwords.csv"
    made = create_accounts(["ada", "blaise", "chloe"], file)
    assert (made.created, made.known) == (("ada", "chloe"), ("blaise",))
    rows = [line.split(",") for line in file.read_text().splitlines()]
    assert [row[0] for row in rows] == ["id", "ada", "chloe"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert [(command[0], command[-1]) for command, _ in ran] == [
        ("useradd", "ada"), ("chpasswd", "chpasswd"), ("useradd", "chloe"), ("chpasswd", "chpasswd"),
    ]  # fmt: skip
    assert ran[1][1] == f"ada:{rows[1][1]}\n"
    assert ran[0][0][1:4] == ["--create-home", "-K", "HOME_MODE=0700"]
    assert len({row[1] for row in rows}) == 3
    assert create_accounts(["blaise"], tmp_path / "none.csv").created == ()
    assert not (tmp_path / "none.csv").exists()


def test_a_refused_account_leaves_the_passwords_of_the_others(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "passwords.csv"
    with pytest.raises(UserError, match=r"cannot create the account refused \(useradd: no space left\)"):
        create_accounts(["ada", "refused", "chloe"], file)
    assert [line.split(",")[0] for line in file.read_text().splitlines()] == ["id", "ada"]
    with pytest.raises(UserError, match="holds passwords already"):
        create_accounts(["ada"], file)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ada", "ada@example.org", "3"], "no names of Unix accounts: ada@example.org, 3"),
        (["ada", "root", "games"], "accounts of the system: root, games"),
    ],
)
def test_names_that_cannot_be_accounts_change_nothing(
    ran: Ran, tmp_path: Path, names: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        create_accounts(names, tmp_path / "passwords.csv")
    assert (ran, list(tmp_path.iterdir())) == ([], [])


def test_only_root_creates_accounts(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="sudo dlo roster accounts"):
        create_accounts(["ada"], tmp_path / "passwords.csv")


def test_the_command_reads_the_table_of_the_roster(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "users.csv").write_text("id;first name\nada;Ada\nblaise;Blaise\n", encoding="utf-8")
    run_app(
        app,
        "dlo",
        ["roster", "accounts", str(tmp_path / "users.csv"), "--passwords", str(tmp_path / "new.csv")],
    )
    assert "1 created, 1 existed" in capsys.readouterr().out
    assert (tmp_path / "new.csv").is_file()


def test_people_of_the_file_have_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub ends with a traceback at its start if a grader has none."""
    settings = read_settings(EXAMPLE)
    known = {"head": 1001, "assistant": 1002}
    monkeypatch.setattr(accounts, "_number", known.get)
    require_accounts(settings)
    del known["assistant"]
    with pytest.raises(UserError, match=r"hub\.toml: assistant in graders of deep26 .*: adduser assistant"):
        require_accounts(settings)


def test_root_is_an_account_of_the_system() -> None:
    assert accounts.system_account("root")
    assert not accounts.system_account("nowhere-at-all")
