"""Measure the memory of a worker that is in none of its processes' figures: unread data in pipes and
terminals, and memory inherited from the zygote that the worker has overwritten.

The judge reads all of it from outside, so it needs no control group. The seccomp filter refuses the other
places: a rank, whose memory checks measure, has one process and creates no socket.

Reference: proc(5), pipe(7), devpts in Documentation/filesystems/devpts.rst. Cost: 0.1 ms, and 2 ms for the
inherited memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import struct
import termios
import time
from collections.abc import Iterable, Iterator, Mapping

from dlo_lib.grading.sandbox.limits import task_state, tasks_of
from dlo_lib.grading.switch.memory import read_proc

TERMINAL_BYTES = 160 << 10  # the buffers of both directions: 64 KiB each, and 4 KiB of lines
SOCKET_BYTES = 1 << 20  # the most that the buffers of one socket hold, rounded up
# A worker copies pages of the zygote by writing to them, mostly reference counts: the ranks of all labs copy
# 5 to 7 MiB until a scenario begins, 14 MiB if a cell draws a figure, and 2 to 5 MiB more until a mark.
COPIED_BEFORE, COPIED_MEANWHILE = 12 << 20, 6 << 20
# What cells allocate honestly until a scenario begins: 0.1 to 0.2 MiB in the labs, 1.5 MiB with a figure or
# an import, 2 MiB more if a table of the interpreter grows, 4 MiB with the largest import that was seen.
GROWN_BEFORE = 4 << 20
STOP_SECONDS = 1.0
STOPPED = ("T", "t", "X", "Z", "")  # states of a thread that moves no data, and of one that has ended


def pipe_bytes(pids: Iterable[int]) -> int:
    """Return the unread bytes in the pipes that these processes have open; each pipe counts once."""
    pipes: dict[tuple[int, int], str] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    state = os.stat(path)
                    if stat.S_ISFIFO(state.st_mode):
                        pipes[state.st_dev, state.st_ino] = path
    return sum(map(_unread, pipes.values()))


def terminal_bytes(pid: int) -> int:
    """Return what the terminals of a sandboxed process can hold."""
    try:
        names = os.listdir(f"/proc/{pid}/root/dev/pts")
    except OSError:  # there are none, or the process has ended
        return 0
    return TERMINAL_BYTES * sum(name.isdigit() for name in names)


def socket_bytes(pid: int) -> int:
    """Return what the sockets of a sandboxed process and its children can hold.

    The kernel counts the sockets of a network namespace: also those in a queue, which no process has open.
    """
    for line in read_proc(f"/proc/{pid}/net/sockstat").splitlines():
        if line.startswith("sockets: used"):
            return SOCKET_BYTES * int(line.split()[2])
    return 0


def copied_bytes(mapped: Mapping[str, int], grown: int) -> int:
    """Return the bytes of inherited memory that a process has overwritten or freed.

    Args:
        mapped: ``mapped_bytes`` of the process.
        grown: bytes by which the resident memory of the process has grown since the fork. A process that
            writes to an inherited page gets a private copy, and its resident memory does not grow.
    """
    return mapped.get("Private_Dirty", 0) + mapped.get("Swap", 0) - grown


def excess(copied: int, before: int) -> int:
    """Return how much of the ``copied`` bytes is more than every worker copies.

    Args:
        before: the copied bytes when the scenario began; at most ``COPIED_BEFORE`` of them count.
    """
    return max(0, copied - min(before, COPIED_BEFORE) - COPIED_MEANWHILE)


@contextlib.contextmanager
def stopped(handle: int, pid: int) -> Iterator[None]:
    """Stop the threads of a process in the block, so that none moves data while others are measured.

    A process with one thread waits for the answer to its mark anyway.

    Args:
        handle: the pidfd of the process.
        pid: its process id.
    """
    if len(tasks_of(pid)) < 2:
        yield
        return
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
    try:
        end = time.monotonic() + STOP_SECONDS
        while time.monotonic() < end and not all(task_state(pid, task) in STOPPED for task in tasks_of(pid)):
            select.select([], [], [], 0.0005)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)


def _unread(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):  # closed meanwhile
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])
    finally:
        os.close(descriptor)
