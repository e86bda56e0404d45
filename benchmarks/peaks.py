"""The peak memory of whole jobs: ours and the peer alternate, each in new processes.

glibc is configured to return every large block to the system when it is freed. By default it keeps many
blocks, and the result would contain its fragmentation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

M_MMAP_THRESHOLD = -3
"""The parameter of mallopt of glibc for the size above which blocks are mapped separately. A set value is
fixed; the default grows."""


def return_freed_memory() -> None:
    """Configure glibc to return freed memory to the system, so that the resident memory is the used
    memory."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def peaks_in_turns(job: Callable[[str], Sequence[int]], repeats: int) -> dict[str, list[float]]:
    """Run ``job("ours")`` and ``job("peer")`` alternately, and return the peak of the largest rank of each
    run.

    Args:
        job: returns the peak of each rank in bytes.
        repeats: the number of runs of each.
    """
    peaks: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(repeats):
        for wrapper in list(peaks)[:: 1 if repeat % 2 == 0 else -1]:
            peaks[wrapper].append(max(job(wrapper)))
    return peaks
