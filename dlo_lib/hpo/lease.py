"""A file lock that marks a worker as alive; the kernel releases it when the worker ends, on any machine.

A worker locks a private file when it starts, and another process that can lock this file knows that the
worker has ended. No time-out has to be chosen. The module calls ``flock`` and does not use ``filelock``,
because readers share the lock: two processes that look at the same time must not see each other. On a
cluster, the folder should be on a file system that passes ``flock`` between nodes (NFS from version 4, GPFS,
or Lustre mounted with ``flock``).

On a file system without ``flock``, the file names the machine and the process instead. There a worker that
was killed is noticed only on its own machine; elsewhere it counts as alive until its file is removed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
import weakref
from pathlib import Path

from dlo_lib.base.lifetime import start_time
from dlo_lib.base.locks import without_flock


class Lease:
    """Mark one worker as alive with a file named ``id`` in ``folder``, until :meth:`end` or the end of the
    process.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.id = uuid.uuid4().hex
        self._path = folder / self.id
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            if not without_flock(error):
                raise
            os.write(self._file, _identity().encode())
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
    except OSError as error:
        if not without_flock(error):
            raise
        return _is_running(os.read(file, 4096).decode(errors="replace"))
    else:
        return False
    finally:
        os.close(file)


def _identity() -> str:
    """Return the machine, the number and the start of this process, because numbers are used again."""
    return f"{socket.gethostname()} {os.getpid()} {start_time(os.getpid())}"


def _is_running(identity: str) -> bool:
    """Whether the process of :func:`_identity` runs, as far as this machine can know.

    A zombie has ended: the kernel has released its locks too.
    """
    machine, *rest = identity.split() or [""]  # empty while the worker writes it
    if machine != socket.gethostname():
        return True
    process, born = map(int, rest)
    return start_time(process) == born


def _end(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)
