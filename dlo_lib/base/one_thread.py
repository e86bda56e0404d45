"""One thread: for the import of numpy, because a process that forks must have one thread, and for torch where
matrices are small."""

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


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside, torch computes with one thread. With small matrices, several threads took 30 times as long on a
    busy machine, and they do not survive a fork."""
    import torch  # here, because this module is imported before numpy

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
