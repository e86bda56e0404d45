"""The removal of temporary folders of killed processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlo_lib.base import temporary_folders as stale
from dlo_lib.base.temporary_folders import locked_folder, remove_stale

PREFIX = "dlo-test-stale-"
OWNER = f"""
import os, sys, time
from dlo_lib.base.temporary_folders import locked_folder
folder, _ = locked_folder({PREFIX!r})
(folder / "answers").mkdir()
print(folder, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(stale, "NEW_SECONDS", -1)


def test_a_folder_is_removed_only_after_its_owner_was_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    remove_stale(PREFIX)
    assert (folder / "answers").is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    remove_stale(PREFIX)
    assert not folder.exists()


def test_the_owner_itself_keeps_its_folder() -> None:
    folder, descriptor = locked_folder(PREFIX)
    remove_stale(PREFIX)
    assert folder.is_dir()
    os.close(descriptor)


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "precious")
    remove_stale(PREFIX)
    assert (tmp_path / "precious").is_dir()


def test_a_new_folder_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale, "NEW_SECONDS", 60)
    (tmp_path / f"{PREFIX}new").mkdir()
    remove_stale(PREFIX)
    assert (tmp_path / f"{PREFIX}new").is_dir()


def test_where_files_have_no_locks_a_folder_is_made_and_none_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    folder, descriptor = locked_folder(PREFIX)
    os.close(descriptor)
    remove_stale(PREFIX)
    assert folder.is_dir()
