"""The peak memory of whole jobs, ours and the peer's in turns, each in processes of its own.

glibc is told to give every large block back to the system when it is freed: by default it keeps many, and the figure would be that of its
fragmentation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

M_MMAP_THRESHOLD = -3
"""A parameter of glibc's mallopt: larger blocks are mapped on their own. Once set it no longer grows by itself."""


def return_freed_memory() -> None:
    """From here on memory that is freed is given back, so that what is resident is what is used."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def peaks_in_turns(job: Callable[[str], Sequence[int]], repeats: int) -> dict[str, list[float]]:
    """The largest rank's peak of each run of ``job("ours")`` and ``job("peer")``, which give bytes by rank."""
    peaks: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(repeats):
        for wrapper in list(peaks)[:: 1 if repeat % 2 == 0 else -1]:
            peaks[wrapper].append(max(job(wrapper)))
    return peaks
