"""Control groups are found only where they work, and are removed with their worker."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlo_lib.base.lifetime import start_time
from dlo_lib.grading.sandbox.cgroups import (
    Group,
    HierarchyV1,
    HierarchyV2,
    find_hierarchy,
    group_for,
    remove_all,
)


def delegated(root: Path, controllers: str = "cpu memory pids", handed_on: str = "memory pids") -> Path:
    """Create a tree like that of version 2, and the file with this process's group."""
    place = root / "user.slice/dlo.scope"
    place.mkdir(parents=True)
    (place / "cgroup.controllers").write_text(controllers)
    (place / "cgroup.subtree_control").write_text(handed_on)
    own = root / "own"
    own.write_text("0::/user.slice/dlo.scope\n")
    return own


def test_version_2_is_used_if_memory_and_pids_are_delegated(tmp_path: Path) -> None:
    own = delegated(tmp_path)
    place = tmp_path / "user.slice/dlo.scope"
    assert HierarchyV2(place).make("one", 1 << 20, 64) == (place / "one",)
    assert (place / "one/memory.max").read_text() == str(1 << 20)
    assert (place / "one/pids.max").read_text() == "64"
    (place / "one/memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert HierarchyV2(place).oom_killed((place / "one",))
    assert find_hierarchy(tmp_path, own) == HierarchyV2(place)


def test_version_2_is_not_used_without_the_controllers(tmp_path: Path) -> None:
    assert find_hierarchy(tmp_path, delegated(tmp_path, "cpu", "")) is None


def test_no_hierarchy_is_found_without_control_groups(tmp_path: Path) -> None:
    assert find_hierarchy(tmp_path, tmp_path / "absent") is None


def test_a_read_only_version_1_hierarchy_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/a\n8:pids:/b\n")
    assert find_hierarchy(tmp_path, tmp_path / "own") is None


def test_a_real_group_contains_its_process_and_is_removed_after_its_end() -> None:
    hierarchy = find_hierarchy()
    if hierarchy is None:
        pytest.skip("NOT TESTED HERE: control groups (none that this user may make)")
    process = subprocess.Popen(["sleep", "60"])
    group = Group(hierarchy, 64 << 20, 16, [process.pid])
    try:
        name = next(
            part for part in Path(f"/proc/{process.pid}/cgroup").read_text().split() if "/dlo-" in part
        ).rpartition("/")[2]
        assert not group.oom_killed
        assert not group.remove(), "a process is in it"
    finally:
        process.kill()
        process.wait()
    remove_all([group])
    parents = None
    if isinstance(hierarchy, HierarchyV1 | HierarchyV2):
        parents = hierarchy.parent if isinstance(hierarchy, HierarchyV2) else hierarchy.memory
    assert parents is not None
    assert not (parents / name).exists()


class Folders:
    """A hierarchy of plain folders, in which the kernel has killed the processes of some groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.killed: set[Path] = set()

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        (self.root / name).mkdir()
        return (self.root / name,)

    def oom_killed(self, folders: Sequence[Path]) -> bool:
        return bool(self.killed & set(folders))


class Empty(Group):
    """A group whose processes have ended."""

    def _add(self, pid: int) -> None:
        pass

    def restart(self, memory: int, tasks: int, pid: int) -> bool:
        return not self.oom_killed


def test_a_group_of_which_the_kernel_killed_a_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlo_lib.grading.sandbox.cgroups.Group", Empty)
    hierarchy, groups = Folders(tmp_path), []
    first = group_for(groups, hierarchy, 1, 1, 1)
    (folder,) = tmp_path.iterdir()
    hierarchy.killed.add(folder)
    first.finished = True
    second = group_for(groups, hierarchy, 1, 1, 1)
    assert groups == [second]
    assert not folder.exists()
    second.finished = True
    assert group_for(groups, hierarchy, 1, 1, 1) is second


def test_the_groups_of_killed_judges_are_removed_wherever_they_were(tmp_path: Path) -> None:
    own = delegated(tmp_path)
    slice_, number = tmp_path / "user.slice", os.getpid()
    ended = [slice_ / "dlo.scope/dlo-4194399-1-a", slice_ / "other.scope/dlo-4194399-1-a"]
    reused = slice_ / f"other.scope/dlo-{number}-1-a"
    mine = slice_ / f"other.scope/dlo-{number}-{start_time(number)}-a"
    young = slice_ / "other.scope/dlo-4194399-1-b"
    for folder in (*ended, reused, mine, young):
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0) if folder != young else None)
    find_hierarchy(tmp_path, own)
    assert [folder.exists() for folder in (*ended, reused, mine, young)] == [False, False, False, True, True]
