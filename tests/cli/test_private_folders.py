"""Other users of a machine cannot read the folders that the library makes in a home."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlo_lib
from dlo_lib.base.files import STATE_PARTS, own_folder, state_dir
from dlo_lib.cli import doctor
from dlo_lib.cli.private import close_copies
from dlo_lib.cli.workspace import update_workspace

SHARED = {"exchange", "library"}  # no answers of a class are in them, and a class may share them


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)  # the group writes too, as on Ubuntu
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_umask: None) -> Path:
    """A home as Debian makes it, in which nothing is chosen by variables."""
    folder = tmp_path / "ada"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("DLO_HOME", "DLO_WORK", "XDG_STATE_HOME", "XDG_DATA_HOME", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_a_new_folder_has_mode_700_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        made = own_folder(tmp_path / "labs", "DLO_WORK")
    finally:
        os.umask(before)
    assert mode(made) == 0o700


def test_the_group_of_a_project_stays_that_of_its_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)  # as $WORK of a centre, whose quota counts the files of a group
    assert mode(own_folder(tmp_path / "dlo", "DLO_HOME")) == 0o2700


def test_every_folder_of_a_home_is_closed(home: Path, course: Path) -> None:
    update_workspace()
    close_copies(os.environ)
    made = [
        home / "dlo-labs", home / ".local/state/dlo", home / ".local/share/jupyter/nbgrader_cache",
        home / ".ipython",
    ]  # fmt: skip
    assert {str(folder): oct(mode(folder)) for folder in made} == {str(folder): "0o700" for folder in made}
    assert mode(home) == 0o755


def test_existing_folders_are_closed_once_with_a_word(
    home: Path, course: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("dlo-labs", ".local/state/dlo"):
        (home / name).mkdir(parents=True)
    (home / "dlo-labs" / "notes.txt").write_text("mine")
    for _ in range(2):
        update_workspace()
    said = capfd.readouterr().err
    assert mode(home / "dlo-labs") == mode(home / ".local/state/dlo") == 0o700
    assert said.count(f"closed to other users of this machine (mode 700): {home / 'dlo-labs'}\n") == 1
    assert (home / "dlo-labs" / "notes.txt").read_text() == "mine"


def test_what_a_user_made_and_names_keeps_its_mode_and_its_parts_are_closed(
    home: Path, course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"  # of a project, whose members share it
    for name in ("91_small", "progress", "data", "exchange"):
        (work / name).mkdir(parents=True)
    monkeypatch.setenv("DLO_WORK", str(work))
    monkeypatch.setenv("DLO_HOME", str(work))
    update_workspace()
    assert [mode(work / name) for name in ("91_small", "progress")] == [0o700, 0o700]
    assert [mode(work / name) for name in (".", "data", "exchange")] == [0o775, 0o775, 0o775]


def test_a_link_to_a_folder_of_the_user_is_followed_and_the_folder_keeps_its_mode(
    home: Path, course: Path, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (home / "dlo-labs").symlink_to(tmp_path / "shared")
    update_workspace()
    assert mode(tmp_path / "shared") == 0o775
    assert mode(tmp_path / "shared" / "91_small") == 0o700


def test_a_folder_that_cannot_be_closed_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / ".local/state/dlo").mkdir(parents=True)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.chmod", refused)
    monkeypatch.setattr(Path, "chmod", refused)
    state_dir()
    said = capfd.readouterr().err
    assert f"can read {home}/.local/state/dlo: it cannot be closed (Operation not permitted)" in said


def test_the_doctor_names_work_that_others_can_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)  # folders of pytest are closed
    shared = tmp_path / "work"
    shared.mkdir()
    monkeypatch.setenv("DLO_WORK", str(shared))
    found = doctor._private()
    assert (found.ok, found.cure) == (False, f"chmod 700 {shared}, unless you share it")
    assert f"other users of this machine can read {shared}" in found.found
    shared.chmod(0o700)
    assert doctor._private().ok
    shared.chmod(0o750)
    assert not doctor._private().ok
    tmp_path.chmod(0o700)  # a closed folder above it
    assert doctor._private().ok


def test_each_part_of_the_state_folder_is_listed() -> None:
    sources = [file.read_text(encoding="utf-8") for file in Path(dlo_lib.__file__).parent.rglob("*.py")]
    used = {name for text in sources for name in re.findall(r'state_dir\(\) / "([a-z_]+)"', text)}
    assert used - SHARED == set(STATE_PARTS)
