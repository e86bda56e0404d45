"""Return what this process has freed, so that a mark counts what the student's code holds.

What a process holds beyond its tensors does not depend on what it did before. Free memory in its heap, in
which a tensor finds room without a trace, and what a matrix product or a driver keeps, do not count.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

M_MMAP_THRESHOLD = -3  # of mallopt(3)
MMAP_BYTES = 1 << 17
"""The bytes from which an allocation has its own mapping, which returns to the system when it is freed."""
SMALL_BYTES = 400
"""The bytes of an object in the reserve: Python keeps objects of up to 512 bytes in separate arenas."""
RESERVE_BYTES = 2 << 20
ARENA_BYTES = 1 << 20
FREE_BUFFERS = ("mkl_serv_free_buffers", "mkl_free_buffers")  # of PyTorch's own MKL, and of a library of MKL


def _functions(library: str | None, *names: str) -> list[Any]:
    """Return the C functions that a library and the libraries it depends on have; none on other systems."""
    with contextlib.suppress(OSError):
        loaded = ctypes.CDLL(library)
        return [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return []


_TRIM = _functions(None, "malloc_trim")  # glibc only
_FREE_BUFFERS = _functions(torch._C.__file__, *FREE_BUFFERS)[:1]


def return_free_memory() -> None:
    """Return to the system what this process has freed: the free pages of its heap (glibc), and the scratch
    memory of matrix products (MKL), which each thread that multiplies keeps.
    """
    for free in _FREE_BUFFERS:
        free()
    for trim in _TRIM:
        trim(0)


def map_large_tensors() -> None:
    """Give each allocation of ``MMAP_BYTES`` or more, such as a tensor, a separate mapping (glibc)."""
    for mallopt in _functions(None, "mallopt"):
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def reserve_small_objects() -> None:
    """Keep ``RESERVE_BYTES`` of memory that only small objects of Python can use.

    The first call of a library fills caches, and Python reads source files for a traceback: 10,000 small
    objects, for ``fully_shard``. They find room here, so that they do not count. Tensors do not fit.
    """
    objects = [bytes(SMALL_BYTES) for _ in range(RESERVE_BYTES // SMALL_BYTES)]
    _kept.extend(objects[:: ARENA_BYTES // SMALL_BYTES // 2])  # an arena with an object is not returned


_kept: list[bytes] = []


def load_driver() -> None:
    """Load the driver of a GPU, if PyTorch is built for one, as the first ``dist.barrier`` does: otherwise
    what the driver keeps would count as the memory of the code that calls it.
    """
    torch._C._get_accelerator()
