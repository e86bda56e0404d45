"""`make test-newest` finds the newest supported Python, and runs the fast tests of a clone on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"

MAKEFILE = """
setup-dev:
	@echo "setup on $$PYTHON, TORCH=$$TORCH, $$MAKELEVEL" >> $(LOG)
	@test ! -e $(LOG).no-setup
test-fast:
	@echo "tests" $(ARGS) $(JOBS) >> $(LOG)
	@test ! -e $(LOG).slow || { echo $$$$ > $(LOG).pid; exec sleep 60; }
	@test ! -e $(LOG).fails
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module of the command, in a checkout whose Makefile writes to a log what it is asked for."""
    monkeypatch.syspath_prepend(str(DEPLOY))
    specification = importlib.util.spec_from_file_location("newest_python", DEPLOY / "newest_python.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "Makefile").write_text(MAKEFILE.replace("$(LOG)", str(tmp_path / "log")), encoding="utf-8")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "Makefile"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(module, "ROOT", root)
    for name in ("TORCH", "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAKEFLAGS", "-n")  # as within another make
    return module


@pytest.fixture
def newer(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same on a machine with a newer Python."""
    monkeypatch.setattr(command, "newest", lambda: ((sys.version_info[0], 99), "python3.99"))
    return command


def run(command: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["newest_python.py", *arguments])
    return command.main()


def pythons(folder: Path, **versions: str) -> list[str]:
    """Programs that print these versions, as (major, minor)."""
    made = []
    for name, version in versions.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
        made.append(str(path))
    return made


def test_the_newest_supported_python_is_taken(command, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(command.setup_env, "SUPPORTED", {sys.version_info[:2], (3, 97), (3, 98)})
    found = pythons(tmp_path, too_new="3 99", none="", too_old="3 6", older="3 97", right="3 98")
    monkeypatch.setattr(command, "candidates", lambda: [*found, str(tmp_path / "missing")])
    assert command.newest() == ((3, 98), str(tmp_path / "right"))
    monkeypatch.setattr(command, "candidates", lambda: found[:3])
    assert command.newest() == (sys.version_info[:2], sys.executable)


def test_pythons_of_pyenv_are_found_the_newest_release_first(command, monkeypatch, tmp_path) -> None:
    releases = ["2.7.18", "3.9.2", "3.13.9", "3.13.10", "3.12.1"]
    for release in releases:
        (tmp_path / "versions" / release / "bin").mkdir(parents=True)
        (tmp_path / "versions" / release / "bin" / "python").touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    found = [Path(path).parts[-3] for path in command.candidates()]
    assert found == ["3.13.10", "3.13.9", "3.12.1", "3.9.2"]


def test_a_machine_with_one_python_passes_in_one_line(command, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(command, "candidates", list)
    assert run(command, monkeypatch) == 0
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (
        capsys.readouterr().out == f"newest: no supported Python here is newer than {here}, that of .venv\n"
    )
    assert not (tmp_path / "log").exists()


def test_the_tests_run_in_a_clone_that_does_not_remain(newer, monkeypatch, tmp_path) -> None:
    assert run(newer, monkeypatch, "-k", "word") == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "setup on python3.99, TORCH=cuda, 1",
        "tests -k word",
    ]
    assert sorted(os.listdir(newer.ROOT)) == [".git", "Makefile"]


def test_what_fails_runs_once_more_one_after_another(newer, monkeypatch, tmp_path) -> None:
    (tmp_path / "log.fails").touch()
    assert run(newer, monkeypatch) == 2
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["tests", f"tests {newer.AGAIN} 0"]


def test_tests_do_not_run_where_the_set_up_fails(newer, monkeypatch, tmp_path) -> None:
    (tmp_path / "log.no-setup").touch()
    assert run(newer, monkeypatch) == 2
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_it_stops_after_its_minutes(newer, monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "log.slow").touch()
    assert run(newer, monkeypatch, "--minutes", "0.02") == 1
    assert capsys.readouterr().err.startswith("newest: stopped after 0.02 minutes: ")
    for _ in range(100):
        if not alive(int((tmp_path / "log.pid").read_text())):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a test is still running")


def test_a_folder_that_is_no_clone_is_named(newer, monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "copy").mkdir()
    monkeypatch.setattr(newer, "ROOT", tmp_path / "copy")
    assert run(newer, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"newest: cannot clone {tmp_path / 'copy'} (")
    assert said.count("\n") == 1


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not waited for it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
