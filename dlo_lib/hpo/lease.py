"""A file lock that marks a worker as alive; the kernel releases it when the worker ends, on any machine.

A worker locks a private file when it starts, and another process that can lock this file knows that the
worker has ended. No time-out has to be chosen. The module calls ``flock`` and does not use ``filelock``,
because readers share the lock: two processes that look at the same time must not see each other. On a
cluster, the folder must be on a file system that passes ``flock`` between nodes (NFS from version 4, GPFS, or
Lustre mounted with ``flock``).
"""

from __future__ import annotations

import fcntl
import os
import uuid
import weakref
from pathlib import Path


class Lease:
    """Mark one worker as alive with a locked file named ``id`` in ``folder``, until :meth:`end` or the end of
    the process.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.id = uuid.uuid4().hex
        self._path = folder / self.id
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # A forked child would keep the lock after its parent has ended.
        self._forked = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda close=self._forked: (method := close()) and method())
        self._end = weakref.finalize(self, _end, self._path, self._file)

    def end(self) -> None:
        """End the lease; other workers now treat this worker as ended."""
        self._end()

    def _close(self) -> None:
        if self._end.detach() is not None:
            os.close(self._file)


def is_alive(folder: Path, worker: str) -> bool:
    """Whether the worker with this id holds its lease in ``folder``."""
    try:
        file = os.open(folder / worker, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


def _end(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)
