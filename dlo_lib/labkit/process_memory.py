"""What this process holds now, and at the peak of a piece of code: the memory in the tables of the labs.

It counts private memory (of every library, not only of tensors), without mapped files, up to some 0.1 MiB.
Linux reports it; elsewhere the results are None. The first call of a function loads code and opens
connections: run it once before a measurement.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

from dlo_lib.grading.switch.memory import anonymous_bytes, status_bytes
from dlo_lib.grading.switch.own_memory import return_free_memory

_CLEAR = Path("/proc/self/clear_refs")
_OF_FILES = ("RssFile", "RssShmem")


def private_bytes() -> int | None:
    """Return the bytes of memory that only this process has; None where the system does not report it.

    Memory that was freed is returned to the system first, as before a mark of a check.
    """
    gc.collect()
    return_free_memory()
    return anonymous_bytes(os.getpid()) or None


def peak_bytes(run: Callable[[], object], repeats: int = 3, beyond: int | None = None) -> int | None:
    """Call ``run`` several times; return the private bytes at the peak of the call that needed least.

    Args:
        beyond: what to subtract, such as :func:`private_bytes` before a model was built; by default the
            private bytes before the call.

    Returns:
        None where the system does not report the peak. ``run`` is called in any case, because the other
        ranks may wait for this one.
    """
    found: list[int] = []
    for _ in range(repeats):
        before = private_bytes()
        reset = _begin_peak()
        peak, files = _peak(), _files()
        run()
        if before is not None and reset:
            grown = _peak() - peak - (_files() - files)
            found.append(max(0, before + grown - (before if beyond is None else beyond)))
    return min(found, default=None)


def _begin_peak() -> bool:
    """Let the peak be counted from here; return False where the system cannot."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak() -> int:
    return status_bytes(os.getpid(), "VmHWM")


def _files() -> int:
    return status_bytes(os.getpid(), *_OF_FILES)
