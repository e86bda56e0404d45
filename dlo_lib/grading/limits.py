"""What a student's process may use, as the kernel counts it; and what it has used, as the judge sees it from outside.

Memory is watched: what the process and all it started hold beyond what they share with the zygote. Time is the processor's: a process
that waits for a processor on a loaded machine is not charged for that, so the same submission gets the same verdict on any evening.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Limits:
    """Of one worker. ``memory`` is what it may hold beyond what it shares with the zygote, in bytes."""

    memory: int = 2 << 30
    tasks: int = 64  # processes and threads together; torch with gloo has about ten
    cpu_seconds: int = 600  # of one process, far beyond any deadline: what is left when nobody looks any more
    file: int = 256 << 20  # bytes of one file
    scratch: int = 192 << 20  # bytes of /tmp
    shared_memory: int = 64 << 20  # bytes of /dev/shm
    inodes: int = 8192  # files in each of the two
    descriptors: int = 512

    def apply(self) -> None:
        """Limit this process and all that it will start."""
        # The judge kills beyond ``memory``; this stops what would be faster than its look.
        data = data_bytes() + 2 * self.memory
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, self.file),
            (resource.RLIMIT_DATA, data),
            (resource.RLIMIT_CPU, self.cpu_seconds),
            (resource.RLIMIT_NOFILE, self.descriptors),
        ):
            _limit(kind, value)

    def apply_tasks(self) -> None:
        """Limit the tasks of this user namespace. Without one of its own it would be all tasks of the user."""
        _limit(resource.RLIMIT_NPROC, self.tasks)


@dataclass(frozen=True)
class Usage:
    """What a worker has used. ``memory`` in bytes; ``cpu`` and ``starved`` (time it wanted a processor and had none) in seconds."""

    memory: int
    cpu: float
    starved: float


def _limit(kind: int, value: int) -> None:
    most = resource.getrlimit(kind)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


@contextlib.contextmanager
def at_most_further(size: int) -> Iterator[None]:
    """Meanwhile this process, with all its threads, may take only ``size`` bytes of memory beyond what it has, else ``MemoryError``.

    Where the kernel does not say what a process has, as on macOS, nothing is limited.
    """
    try:
        limit = data_bytes() + size
    except FileNotFoundError:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def usage(keeper: int, shared: int) -> Usage:
    """Of all processes below ``keeper``; ``shared``: bytes that each has in common with the zygote."""
    pids = list(descendants(keeper))
    memory = sum(max(0, resident_bytes(pid) - shared) for pid in pids)
    cpu = _cpu_seconds(keeper)[1] + sum(sum(_cpu_seconds(pid)) for pid in pids)
    return Usage(memory, cpu, sum(map(_starved_seconds, pids)))


def descendants(pid: int) -> Iterator[int]:
    """The processes that ``pid`` started, and those that they did."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        children = [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is no file's, in bytes; 0 when it is gone."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem", "VmSwap")))


def scratch_bytes(pid: int, folders: Iterable[str] = ("tmp", "dev/shm")) -> int:
    """Bytes of the files that a sandboxed process sees in its own /tmp and /dev/shm, which are memory; deleted ones that are open count."""
    total = 0
    for folder in folders:
        with contextlib.suppress(OSError):  # it is gone, or a plain user may not look
            space = os.statvfs(f"/proc/{pid}/root/{folder}")
            total += (space.f_blocks - space.f_bfree) * space.f_frsize
    return total


def data_bytes() -> int:
    """Private writable memory of this process, mapped or not."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process itself, and of the children that it has waited for."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    user, system, child_user, child_system = (int(value) / TICKS for value in fields[11:15]) if fields else (0.0,) * 4
    return user + system, child_user + child_system


def _starved_seconds(pid: int) -> float:
    """Time that the process's first thread was ready to run and had no processor."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # gone meanwhile
        return ""
