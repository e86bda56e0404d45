"""Limits on the resources of a student's process, set in the kernel, and their use, measured by the judge.

The memory of a worker is that of all its processes beyond what they share with the zygote. Its time is CPU
time: waiting for a processor on a loaded machine does not count, so that the same submission always gets the
same verdict.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dlo_lib.grading.switch.memory import read_proc, resident_bytes

TICKS = os.sysconf("SC_CLK_TCK")
RLIMIT_SIGPENDING = 11  # Python has no name for it
INODE_BYTES = 1024  # the name of a file and what the kernel stores about it


@dataclass(frozen=True)
class Limits:
    """The limits of one worker.

    Args:
        memory: bytes it may hold beyond what it shares with the zygote.
        rank: it is a rank, whose memory checks measure: it has one process and creates no socket, because
            other processes and sockets could hold memory that no measurement finds.
    """

    memory: int = 2 << 30
    tasks: int = 64  # processes and threads together; torch with gloo has about ten
    cpu_seconds: int = 600  # of one process; far beyond each deadline, a limit for a process without a judge
    file: int = 256 << 20  # bytes of one file
    scratch: int = 192 << 20  # bytes of /tmp
    shared_memory: int = 64 << 20  # bytes of /dev/shm
    inodes: int = 8192  # files in each of /tmp and /dev/shm
    descriptors: int = 512
    terminals: int = 4
    signals: int = 64  # that wait for a handler; the kernel stores the data of each
    rank: bool = False

    def apply(self) -> None:
        """Limit this process and all processes that it starts."""
        # The judge kills a worker above ``memory``; this limit stops a growth that is faster than its
        # measurements.
        data = data_bytes() + 2 * self.memory
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, self.file),
            (resource.RLIMIT_DATA, data),
            (resource.RLIMIT_CPU, self.cpu_seconds),
            (resource.RLIMIT_NOFILE, self.descriptors),
            (RLIMIT_SIGPENDING, self.signals),
            (resource.RLIMIT_MEMLOCK, 0),  # the kernel counts it for all workers together
        ):
            _limit(kind, value)

    def apply_tasks(self) -> None:
        """Limit the tasks of this user namespace. In the host's namespace, all tasks of the user
        would count.
        """
        _limit(resource.RLIMIT_NPROC, self.tasks)


@dataclass(frozen=True)
class Usage:
    """The processor time that a worker has used.

    Args:
        cpu: CPU time in seconds.
        starved: seconds in which the worker was ready to run and had no processor; of several processes,
            those of the one that waited longest, because they wait for each other too.
    """

    cpu: float
    starved: float


def _limit(kind: int, value: int) -> None:
    most = resource.getrlimit(kind)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


@contextlib.contextmanager
def limit_growth(size: int) -> Iterator[None]:
    """Limit the growth of this process's memory to ``size`` bytes; a larger allocation raises
    ``MemoryError``.

    A context manager. On systems that do not report the memory of a process, such as macOS, there is no
    limit.
    """
    if not os.path.exists("/proc/self/status"):
        yield
        return
    limit = data_bytes() + size
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def usage(pids: Iterable[int], supervisor: int | None = None) -> Usage:
    """Return the processor time of these processes, and of the orphans that their ``supervisor`` has waited
    for.
    """
    cpu = starved = 0.0
    for pid in pids:
        ran, waited = _scheduled_seconds(pid)
        # Its fields count ticks of 10 ms, and most answers need less. That of the first thread is exact.
        own, reaped = _cpu_seconds(pid)
        cpu += max(own, ran) + reaped
        starved = max(starved, waited)
    if supervisor is not None:
        cpu += _cpu_seconds(supervisor)[1]
    return Usage(cpu, starved)


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of its descendants, and of those that they have waited for."""
    return sum(sum(_cpu_seconds(each)) for each in (pid, *descendants(pid)))


def memory_beyond(pids: Iterable[int], shared: int) -> int:
    """Return the bytes that these processes hold; ``shared``: bytes that each shares with the zygote."""
    return sum(max(0, resident_bytes(pid) - shared) for pid in pids)


def descendants(pid: int) -> Iterator[int]:
    """Yield the process ids of the children of ``pid`` and of all their descendants."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        children = [
            int(child)
            for thread in threads
            for child in read_proc(f"/proc/{pid}/task/{thread}/children").split()
        ]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)


def pid_of(handle: int) -> int:
    """Return the process id of a pidfd in this pid namespace; -1 if the process has ended."""
    with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def tasks_of(pid: int) -> list[int]:
    """Return the threads of a process; none if it has ended."""
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def task_state(pid: int, task: int) -> str:
    """Return the state of a thread as a letter of proc(5), such as R; empty if it has ended."""
    return "".join(read_proc(f"/proc/{pid}/task/{task}/stat").rpartition(")")[2].split()[:1])


def scratch_bytes(pid: int, folders: Iterable[str] = ("tmp", "dev/shm")) -> int:
    """Return the bytes of the files in the /tmp and /dev/shm of a sandboxed process, which are in memory.

    Deleted files count as long as they are open. Names count too: 8192 long ones hold 2 MB.
    """
    total = 0
    for folder in folders:
        with contextlib.suppress(OSError):  # the process has ended, or this user may not read it
            space = os.statvfs(f"/proc/{pid}/root/{folder}")
            total += (space.f_blocks - space.f_bfree) * space.f_frsize
            total += (space.f_files - space.f_ffree) * INODE_BYTES
    return total


def data_bytes() -> int:
    """Return the private writable memory of this process in bytes, mapped or not."""
    lines = read_proc("/proc/self/status").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU time of a process and of the children it has waited for, in seconds."""
    fields = read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()
    user, system, child_user, child_system = (
        (int(value) / TICKS for value in fields[11:15]) if fields else (0.0,) * 4
    )
    return user + system, child_user + child_system


def ran_seconds(pid: int) -> float:
    """Return the CPU time of the first thread of a process in seconds, which is exact also if it is short."""
    return _scheduled_seconds(pid)[0]


def starved_seconds(pid: int) -> float:
    """Return the seconds in which the first thread of a process was ready to run and had no processor."""
    return _scheduled_seconds(pid)[1]


def busy_seconds() -> float:
    """Return the seconds in which this process has computed or waited for a processor."""
    return time.process_time() + starved_seconds(os.getpid())


def _scheduled_seconds(pid: int) -> tuple[float, float]:
    """Return the seconds in which the first thread of a process has run, and has waited for a processor."""
    fields = read_proc(f"/proc/{pid}/schedstat").split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) == 3 else (0.0, 0.0)
