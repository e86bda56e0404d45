"""Temporary folders, and the removal of those whose processes were killed.

A process holds a lock on its folder; the kernel releases the lock when the process and all its forks have
ended. A folder that can be locked is stale. Reference: flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

NEW_SECONDS = 60  # a younger folder may not be locked yet


def locked_folder(prefix: str) -> tuple[Path, int]:
    """Create a temporary folder; return it and the descriptor of its lock, to close when the folder is
    removed.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks, on which nothing is found stale either
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder, descriptor


def remove_stale(prefix: str) -> None:
    """Remove the stale temporary folders of this user that begin with ``prefix``."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # locked, removed, or not readable
            state = folder.lstat()
            if state.st_uid != os.geteuid() or time.time() - state.st_ctime < NEW_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
