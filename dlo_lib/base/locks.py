"""A lock on a file that also works where the file system has no ``flock``.

Lustre without the mount option ``flock``, and NFS without its lock daemon, refuse the call. There the lock is
the existence of a second file (``SoftFileLock``), which holds the number and the machine of its process, so
that the lock of a process that was killed is found and broken, on its machine.
"""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def without_flock(error: OSError) -> bool:
    """Whether ``flock`` failed with this error because the file system has no locks."""
    return error.errno in _WITHOUT_LOCKS


def file_lock(file: Path, mode: int | None = None) -> BaseFileLock:
    """Return a lock of ``file``, not yet acquired, of a kind that its file system supports.

    Args:
        mode: permissions of the file of the lock; None: those of a new file.
    """
    with file.open("a") as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process holds it, so there are locks
        except OSError as error:
            if not without_flock(error):
                raise
            soft = file.with_name(f"{file.name}.held")
            return SoftFileLock(soft) if mode is None else SoftFileLock(soft, mode=mode)
    return FileLock(file) if mode is None else FileLock(file, mode=mode)
