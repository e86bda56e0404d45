"""Import numpy without the threads of OpenBLAS: a process that forks must have one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ONE_THREAD = "OPENBLAS_NUM_THREADS"
"""The variable that OpenBLAS reads when numpy is imported."""


@contextmanager
def import_without_threads() -> Iterator[None]:
    """Inside, the import of numpy starts no thread, which a fork would lose. The variable is as before
    afterwards, so that other processes have their threads.
    """
    before = os.environ.get(ONE_THREAD)
    os.environ[ONE_THREAD] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ONE_THREAD]
        else:
            os.environ[ONE_THREAD] = before
