"""Read the memory of another process, for marks, without importing PyTorch (``own_memory`` does)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Mapping


def resident_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, without pages of files; 0 if the process has ended."""
    return status_bytes(pid, "RssAnon", "RssShmem", "VmSwap", "HugetlbPages")


def status_bytes(pid: int, *names: str) -> int:
    """Return the sum of some figures of ``status`` of a process in bytes, such as ``VmHWM``, the peak of its
    memory; 0 if the process has ended.
    """
    lines = read_proc(f"/proc/{pid}/status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def mapped_bytes(pid: int) -> dict[str, int]:
    """Return the figures of ``smaps_rollup`` of a process in bytes, such as ``Anonymous``: its pages, counted
    one by one; empty if the process has ended, or may not be read. Cost: up to 15 ms.
    """
    lines = read_proc(f"/proc/{pid}/smaps_rollup").splitlines()[1:]
    return {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


def exact_bytes(pid: int, mapped: Mapping[str, int] | None = None) -> int:
    """Return the same as :func:`resident_bytes`, counted page by page.

    Args:
        mapped: :func:`mapped_bytes` of the process, if they are known.
    """
    return anonymous_bytes(pid, mapped) + status_bytes(pid, "RssShmem", "HugetlbPages")


def anonymous_bytes(pid: int, mapped: Mapping[str, int] | None = None) -> int:
    """Return the memory of a process in bytes without files and without what it shares with others, counted
    page by page; 0 if the process has ended.

    The kernel adds the figures of ``status`` up for each processor, and up to Linux 6.16 what it shows is off
    by some MiB on a machine with many. Where pages cannot be counted, it is the figure of ``status``.

    Args:
        mapped: :func:`mapped_bytes` of the process, if they are known.
    """
    mapped = mapped_bytes(pid) if mapped is None else mapped
    return mapped["Anonymous"] + mapped["Swap"] if mapped else status_bytes(pid, "RssAnon", "VmSwap")


def sent_and_unread(line: socket.socket) -> int:
    """Return the bytes that were sent on ``line`` and that the other end has not read, with what the kernel
    adds to them; 0 on systems other than Linux.
    """
    if sys.platform != "linux":
        return 0
    return int(struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4)))[0])


def read_proc(path: str) -> str:
    """Return the content of a file of ``/proc``; empty if the process has ended."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a third of the time of a text file
    except OSError:
        return ""
    parts = []
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("ascii", "replace")
