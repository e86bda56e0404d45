"""What this process holds now, and at the peak of a piece of code: the memory in the tables of the labs.

It counts private memory (of every library, not only of tensors), without mapped files, up to some 0.1 MiB.
Linux reports it; elsewhere the results are None. The first call of a function loads code and opens
connections: run it once before a measurement.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def private_bytes() -> int | None:
    """Return the bytes of memory that only this process has; None where the system does not report it."""
    _return_free_memory()
    return _status("RssAnon") if _STATUS.is_file() else None


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
        before = private_bytes() if beyond is None else beyond
        try:
            _CLEAR.write_text("5", encoding="ascii")  # the peak is counted from here
        except OSError:
            before = None
        run()
        if before is not None:
            found.append(max(0, _status("VmHWM") - _status("RssFile") - _status("RssShmem") - before))
    return min(found, default=None)


def _return_free_memory() -> None:
    """glibc keeps freed memory for later: return it to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    (line,) = (
        line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:")
    )
    return 1024 * int(line.split()[1])
