"""One grader at a time on a lab: a lock in the folder of its grades, which the kernel releases however its holder ends. flock(2)."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dlo_lib.errors import UserError
from dlo_lib.text import tr

LOCK_FILE = "lock"


@contextlib.contextmanager
def only_grader(folder: Path) -> Iterator[Path]:
    """Hold ``folder`` while grading, so that no two graders write the same rows.

    Raises:
        UserError: another one holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield folder
    except BlockingIOError:
        other = os.read(handle, 20).decode(errors="replace").strip()
        raise UserError(
            tr("another grader (process {pid}) is at work on {folder}: wait until it is done", pid=other, folder=folder)
        ) from None
    finally:
        os.close(handle)
