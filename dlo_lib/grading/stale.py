"""Temporary folders that are removed for whoever was killed before removing them.

Their owner holds a lock on such a folder as long as it or a process forked from it lives; the kernel lets go of it however they end. A
folder that can be locked is nobody's. Reference: flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

NEW_SECONDS = 60  # between the making of a folder and its lock there is a moment


def locked_folder(prefix: str) -> tuple[Path, int]:
    """A new temporary folder, and the descriptor that keeps it: close it when the folder is removed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder, descriptor


def remove_stale(prefix: str) -> None:
    """Remove this user's temporary folders with ``prefix`` whose owners are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # locked, gone, or not ours to look at
            state = folder.lstat()
            if state.st_uid != os.geteuid() or time.time() - state.st_ctime < NEW_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
