"""Control groups, where the host lets the judge make some: the kernel's own limit on a worker's memory and tasks.

The judge's look from outside comes every 50 ms and counts what processes hold. A group counts also what no process holds (files in memory,
buffers of sockets and pipes), at the moment it is taken. Version 2 needs a group that is delegated to whoever grades, with nothing else in
it: ``systemd-run --user --scope -p Delegate=yes dlo grade ...``; version 1 needs root.

Reference: Documentation/admin-guide/cgroup-v2.rst of the Linux kernel. Cost: about 0.2 ms a worker.
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

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")
REMOVE_SECONDS = 2.0  # the processes of a group that was killed need a moment to go


class Hierarchy(Protocol):
    """One version's folders and file names."""

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        """New folders, with the limits set."""
        ...

    def killed(self, folders: Sequence[Path]) -> bool:
        """The kernel has ended a process there for its memory."""
        ...


@dataclass(frozen=True)
class Unified:
    """Version 2: ``parent`` hands memory and pids on to the groups in it."""

    parent: Path

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        """One folder for both."""
        folder = self.parent / name
        folder.mkdir()
        (folder / "memory.max").write_text(str(memory))
        (folder / "pids.max").write_text(str(tasks))
        with contextlib.suppress(OSError):  # a kernel without swap accounting
            (folder / "memory.swap.max").write_text("0")
        return (folder,)

    def killed(self, folders: Sequence[Path]) -> bool:
        """``oom_kill`` of memory.events."""
        return _count(folders[0] / "memory.events") > 0


@dataclass(frozen=True)
class Separate:
    """Version 1: a folder for each controller."""

    memory: Path
    pids: Path

    def make(self, name: str, memory: int, tasks: int) -> tuple[Path, ...]:
        """One folder for each."""
        folders = (self.memory / name, self.pids / name)
        for folder, file, value in zip(folders, ("memory.limit_in_bytes", "pids.max"), (memory, tasks)):
            folder.mkdir()
            (folder / file).write_text(str(value))
        return folders

    def killed(self, folders: Sequence[Path]) -> bool:
        """``oom_kill`` of memory.oom_control."""
        return _count(folders[0] / "memory.oom_control") > 0


class Group:
    """The group of one worker. ``over``: it has been killed, and nobody will ask any more."""

    over = False

    def __init__(self, hierarchy: Hierarchy, memory: int, tasks: int, pids: Iterable[int]) -> None:
        self._hierarchy = hierarchy
        self._folders = hierarchy.make(f"dlo-{os.getpid()}-{secrets.token_hex(6)}", memory, tasks)
        for pid in pids:
            for folder in self._folders:
                (folder / "cgroup.procs").write_text(str(pid))

    @property
    def killed(self) -> bool:
        """The kernel has ended a process of it for its memory."""
        return self._hierarchy.killed(self._folders)

    def remove(self) -> bool:
        """Remove it, if its processes are gone."""
        for folder in self._folders:
            with contextlib.suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError:
                    return False
        return True


def remove_all(groups: Iterable[Group]) -> None:
    """Remove groups whose processes were killed a moment ago."""
    end = time.monotonic() + REMOVE_SECONDS
    for group in groups:
        while not group.remove() and time.monotonic() < end:
            time.sleep(0.01)


@functools.cache
def find_hierarchy(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Hierarchy | None:
    """Where this process may make groups that count memory and tasks; None where it may not."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    places = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
    hierarchy: Hierarchy | None = None
    if all(name in places for name in CONTROLLERS):
        hierarchy = Separate(*(root / name / places[name] for name in CONTROLLERS))
    elif "" in places and _handed_on(root / places[""]):
        hierarchy = Unified(root / places[""])
    try:
        if hierarchy is not None:
            Group(hierarchy, 1 << 30, 64, ()).remove()
            _tidy(hierarchy)
    except OSError:
        return None
    return hierarchy


def _tidy(hierarchy: Hierarchy) -> None:
    """Remove what judges have left that were killed; their processes went with them."""
    for parent in vars(hierarchy).values():
        for folder in parent.glob("dlo-*-*"):
            if not Path(f"/proc/{folder.name.split('-')[1]}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _handed_on(folder: Path) -> bool:
    """Both controllers are handed on to the groups in ``folder``, or can be once this process has moved into a group of its own."""
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
        except OSError:  # somebody else lives there: go back
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            judge.rmdir()
            return False
    except OSError:
        return False
    return True


def _count(file: Path) -> int:
    """The value of ``oom_kill`` in a file of names and values; 0 when there is none."""
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    return next((int(value) for name, value in pairs if name == "oom_kill"), 0)
