"""Locks that end with their process: what one worker holds is free again as soon as it is killed, on this machine or another.

``FileLock`` is one mutex for all processes that share a study's file. ``Lease`` says that a worker lives: it holds a lock on a file of its
own from its start, and whoever can lock that file knows that the worker is gone. Both are ``flock``, which the kernel gives up with the
process; no time-out has to be guessed. On a cluster the folder must be on a file system that passes ``flock`` between nodes (NFS from
version 4, GPFS, Lustre mounted with ``flock``).
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileLock:
    """A mutex among processes and threads; whoever holds it may take it again. Its two methods are those that Optuna's journal wants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._threads = threading.RLock()
        self._depth = 0
        self._file = -1

    def acquire(self) -> bool:
        """Wait until it is free, and take it."""
        self._threads.acquire()
        if self._depth == 0:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        return True

    def release(self) -> None:
        """Give it back, once for each time that it was taken."""
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a copy that a child forked meanwhile may have
            os.close(self._file)
        self._threads.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it for a while."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


class Lease:
    """The sign of life of one worker: a locked file named ``id`` in ``folder``, until :meth:`end` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.id = uuid.uuid4().hex
        self._path = folder / self.id
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # A forked child would hold the lock on after its parent's death.
        self._forked = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda close=self._forked: (method := close()) and method())
        self._end = weakref.finalize(self, _end, self._path, self._file)

    def end(self) -> None:
        """The worker leaves; to others it is gone from now on."""
        self._end()

    def _close(self) -> None:
        if self._end.detach() is not None:
            os.close(self._file)


def is_alive(folder: Path, worker: str) -> bool:
    """Whether the worker of that id still holds its lease in ``folder``."""
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
