"""Collapse the memory of this process into huge pages, so that a fork takes a third of the time.

A fork copies one entry of the page table for each page: 60,000 entries for a process that has imported torch,
and the child frees them at its end. Pages of 2 MiB need about a hundred. A child that writes still gets a
copy of only the small page it writes to. ``MADV_COLLAPSE`` changes existing pages, not later allocations.

Reference: madvise(2), Linux 6.1. An older kernel refuses the call, and memory stays unchanged. Cost: 2 ms for
each 2 MiB, once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

HUGE = 2 << 20
MADV_COLLAPSE = 25


def collapse() -> Iterator[bool]:
    """Collapse one huge page at each step and yield True; the caller takes a step when it has no
    other work.
    """
    madvise = ctypes.CDLL(None).madvise
    for begin, end in _private_memory():
        for address in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE):
            if madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), MADV_COLLAPSE):
                break  # the kernel does not collapse this mapping
            yield True


def _private_memory() -> list[tuple[int, int]]:
    """Return the (begin, end) addresses of the private writable memory of this process that is not a
    file's.
    """
    places = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            addresses, access, _, _, file_number, *_ = line.split(maxsplit=5)
            if access.startswith("rw") and access[3] == "p" and file_number == "0":
                begin, end = addresses.split("-")
                places.append((int(begin, 16), int(end, 16)))
    return places
