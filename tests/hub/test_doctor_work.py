"""`dlo doctor --hub` tries to read the work of each student as another one, with real Unix users."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlo_lib.cli.doctor_hub_work import FOLDERS, examine_work
from dlo_lib.hub.read_settings import read_settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: other users' files (needs root)")
EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "hub" / "hub.toml"


@pytest.fixture
def people(tmp_path: Path) -> list[pwd.struct_passwd]:
    """Three accounts of the system whose homes are open, with a closed file in each folder."""
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    found = []
    for name in ("daemon", "bin", "sys"):
        account = pwd.getpwnam(name)
        home = tmp_path / name
        for folder in FOLDERS:
            place = home / folder
            place.mkdir(parents=True)
            (place / "answer.ipynb").write_text("{}")
        for path in (home, *home.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)
            path.chmod(0o755 if path.is_dir() else 0o644)
        for folder in FOLDERS:
            (home / folder).chmod(0o700)
        found.append(SimpleNamespace(**{**_fields(account), "pw_dir": str(home)}))
    return found


def _fields(account: pwd.struct_passwd) -> dict[str, object]:
    return {name: getattr(account, name) for name in ("pw_name", "pw_uid", "pw_gid")}


def test_closed_folders_pass(people: list[pwd.struct_passwd]) -> None:
    (course,) = read_settings(EXAMPLE).courses
    assert examine_work(course, people).ok
    assert examine_work(course, people[1:2]).ok


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("mode", [0o755, 0o711], ids=["listed", "known by its name"])
def test_an_open_folder_is_named_with_who_reads_it(
    people: list[pwd.struct_passwd], folder: str, mode: int
) -> None:
    (course,) = read_settings(EXAMPLE).courses
    place = Path(people[1].pw_dir) / folder
    place.chmod(mode)
    found = examine_work(course, people)
    assert (found.ok, found.required) == (False, True)
    assert f"sys can read {place}/answer.ipynb (1 of 3 students are open)" in found.found
    assert "stop the server of bin" in found.cure
