"""Control groups: the kernel's limit on the memory and the tasks of a worker, on hosts that let the judge
create them.

Without a group, the judge reads the memory of the processes every 50 ms. A group also counts memory that
belongs to no process (files in memory, buffers of sockets and pipes), and counts it when it is allocated.
Version 2 needs a group that is delegated to the grading user and holds no other process:
``systemd-run --user --scope -p Delegate=yes dlo grade ...``; version 1 needs root.

Reference: Documentation/admin-guide/cgroup-v2.rst of the Linux kernel. Cost: about 0.2 ms per worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dlo_lib.base.lifetime import start_time

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")
YOUNG_SECONDS = 60.0
REMOVE_SECONDS = 2.0  # killed processes need a moment to leave their group


class Hierarchy(Protocol):
    """The folders and file names of one version of control groups."""

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        """Create the folders of a group and set its limits: ``memory`` in bytes, ``tasks`` processes and
        threads.
        """
        ...

    def oom_killed(self, folders: Sequence[Path]) -> bool:
        """Return True if the kernel has killed a process of the group because of its memory."""
        ...


@dataclass(frozen=True)
class HierarchyV2:
    """Version 2: one folder for all controllers; ``parent`` delegates memory and pids to its subgroups."""

    parent: Path

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        """Create one folder for both controllers."""
        folder = self.parent / name
        folder.mkdir()
        (folder / "memory.max").write_text(str(memory))
        (folder / "pids.max").write_text(str(tasks))
        with contextlib.suppress(OSError):  # a kernel without swap accounting
            (folder / "memory.swap.max").write_text("0")
        return (folder,)

    def oom_killed(self, folders: Sequence[Path]) -> bool:
        """Read ``oom_kill`` of memory.events."""
        return _count(folders[0] / "memory.events") > 0


@dataclass(frozen=True)
class HierarchyV1:
    """Version 1: a folder for each controller."""

    memory: Path
    pids: Path

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        """Create one folder for each controller."""
        folders = (self.memory / name, self.pids / name)
        for folder, file, value in zip(folders, ("memory.limit_in_bytes", "pids.max"), (memory, tasks)):
            folder.mkdir()
            (folder / file).write_text(str(value))
        return folders

    def oom_killed(self, folders: Sequence[Path]) -> bool:
        """Read ``oom_kill`` of memory.oom_control."""
        return _count(folders[0] / "memory.oom_control") > 0


class Group:
    """The control group of one worker. ``finished``: its worker is closed, so the group can be removed, or
    used for another worker.
    """

    finished = False

    def __init__(self, hierarchy: Hierarchy, memory: int, tasks: int, pids: Iterable[int]) -> None:
        self._hierarchy, self._limits = hierarchy, (memory, tasks)
        self._folders = hierarchy.make(_name(os.getpid()), memory, tasks)
        for pid in pids:
            self._add(pid)

    @property
    def oom_killed(self) -> bool:
        """True if the kernel has killed a process of the group because of its memory."""
        return self._hierarchy.oom_killed(self._folders)

    def restart(self, memory: int, tasks: int, pid: int) -> bool:
        """Use a finished group for another worker; return False if it does not fit.

        It fits if it has the same limits, if no process is left in it, and if the kernel has killed none.
        Making and removing a group takes longer than the start of a worker.
        """
        if self._limits != (memory, tasks) or self.oom_killed:
            return False
        try:
            if any((folder / "cgroup.procs").read_bytes() for folder in self._folders):
                return False
            self._add(pid)
        except FileNotFoundError:  # removed by another program
            return False
        self.finished = False
        return True

    def _add(self, pid: int) -> None:
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> bool:
        """Remove the group; return False while processes are left in it."""
        for folder in self._folders:
            with contextlib.suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError:
                    return False
        return True


def group_for(groups: list[Group], hierarchy: Hierarchy, memory: int, tasks: int, pid: int) -> Group:
    """Return a group of ``groups`` that holds only the process ``pid``: a finished one, or a new one.

    A finished group of which the kernel has killed a process is not used again, so it is removed.
    """
    for group in list(groups):
        if group.finished and group.restart(memory, tasks, pid):
            return group
        if group.finished and group.oom_killed and group.remove():
            groups.remove(group)
    group = Group(hierarchy, memory, tasks, [pid])
    groups.append(group)
    return group


def remove_all(groups: Iterable[Group]) -> None:
    """Remove groups whose processes have just been killed; wait up to ``REMOVE_SECONDS`` for these to end."""
    end = time.monotonic() + REMOVE_SECONDS
    for group in groups:
        while not group.remove() and time.monotonic() < end:
            time.sleep(0.01)


@functools.cache
def find_hierarchy(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Hierarchy | None:
    """Return where this process may create groups that limit memory and tasks, or None if it may not."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    places = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
    hierarchy: Hierarchy | None = None
    if all(name in places for name in CONTROLLERS):
        hierarchy = HierarchyV1(*(root / name / places[name] for name in CONTROLLERS))
    elif "" in places and _delegates(root / places[""]):
        hierarchy = HierarchyV2(root / places[""])
    try:
        if hierarchy is not None:
            Group(hierarchy, 1 << 30, 64, ()).remove()
            _remove_stale(hierarchy)
    except OSError:
        return None
    return hierarchy


def _name(process: int) -> str:
    """Return a new name for a group of this process; its start tells it from a later one with its number."""
    return f"dlo-{process}-{start_time(process)}-{secrets.token_hex(6)}"


def _remove_stale(hierarchy: Hierarchy) -> None:
    """Remove the groups of judges that were killed, with all their processes.

    Such a judge may have been in another group than this process, as each session of a user is, so the groups
    beside this one are searched too.
    """
    for parent in vars(hierarchy).values():
        for folder in {*parent.glob("dlo-*-*"), *parent.parent.glob("*/dlo-*-*")}:
            _, process, *started = folder.name.split("-")
            with contextlib.suppress(OSError, ValueError):
                began = start_time(int(process))
                young = time.time() - folder.stat().st_mtime < YOUNG_SECONDS  # of another container's judge
                if not (young if began == 0 else started[:-1] in ([], [str(began)])):
                    folder.rmdir()


def _delegates(folder: Path) -> bool:
    """Return True if the groups in ``folder`` have both controllers.

    If they do not, move this process to a subgroup and enable the controllers; version 2 allows that only in
    a group without processes.
    """
    control = folder / "cgroup.subtree_control"
    try:
        if set(CONTROLLERS) <= set(control.read_text().split()):
            return True
        if not set(CONTROLLERS) <= set((folder / "cgroup.controllers").read_text().split()):
            return False
        judge = folder / "dlo-judge"
        judge.mkdir(exist_ok=True)
        (judge / "cgroup.procs").write_text(str(os.getpid()))
        try:
            control.write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        except OSError:  # the group holds other processes: move back
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            judge.rmdir()
            return False
    except OSError:
        return False
    return True


def _count(file: Path) -> int:
    """Return the value of ``oom_kill`` in a file of names and values, or 0 if there is none."""
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(value) for name, value in pairs if name == "oom_kill"), 0)
