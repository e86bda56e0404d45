"""Control groups: found only where they work, and gone with the worker they were for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dlo_lib.grading.cgroups import Group, Separate, Unified, find_hierarchy, remove_all


def delegated(root: Path, controllers: str = "cpu memory pids", handed_on: str = "memory pids") -> Path:
    """A tree that looks like version 2's, with the file that names this process's place in it."""
    place = root / "user.slice/dlo.scope"
    place.mkdir(parents=True)
    (place / "cgroup.controllers").write_text(controllers)
    (place / "cgroup.subtree_control").write_text(handed_on)
    own = root / "own"
    own.write_text("0::/user.slice/dlo.scope\n")
    return own


def test_version_2_is_used_where_memory_and_pids_are_handed_on(tmp_path: Path) -> None:
    own = delegated(tmp_path)
    place = tmp_path / "user.slice/dlo.scope"
    assert Unified(place).make("one", 1 << 20, 64) == (place / "one",)
    assert (place / "one/memory.max").read_text() == str(1 << 20)
    assert (place / "one/pids.max").read_text() == "64"
    (place / "one/memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert Unified(place).killed((place / "one",))
    assert find_hierarchy(tmp_path, own) == Unified(place)


def test_version_2_is_left_alone_without_the_controllers(tmp_path: Path) -> None:
    assert find_hierarchy(tmp_path, delegated(tmp_path, "cpu", "")) is None


def test_there_may_be_none_at_all(tmp_path: Path) -> None:
    assert find_hierarchy(tmp_path, tmp_path / "absent") is None


def test_a_version_1_place_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/a\n8:pids:/b\n")
    assert find_hierarchy(tmp_path, tmp_path / "own") is None


def test_a_real_group_holds_its_process_and_goes_when_that_has_ended() -> None:
    hierarchy = find_hierarchy()
    if hierarchy is None:
        pytest.skip("NOT TESTED HERE: control groups (none that this user may make)")
    process = subprocess.Popen(["sleep", "60"])
    group = Group(hierarchy, 64 << 20, 16, [process.pid])
    try:
        name = next(part for part in Path(f"/proc/{process.pid}/cgroup").read_text().split() if "/dlo-" in part).rpartition("/")[2]
        assert not group.killed
        assert not group.remove(), "a process is in it"
    finally:
        process.kill()
        process.wait()
    remove_all([group])
    parents = hierarchy.parent if isinstance(hierarchy, Unified) else hierarchy.memory if isinstance(hierarchy, Separate) else None
    assert parents is not None
    assert not (parents / name).exists()
