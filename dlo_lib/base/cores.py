"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores on which this process may run: on Linux those of its affinity, which a batch
    system can limit, elsewhere those of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
