"""A lock in the folder of a lab's grades, so that one process grades at a time. The kernel releases it when
its holder ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import Timeout

from dlo_lib.base.errors import UserError
from dlo_lib.base.locks import file_lock
from dlo_lib.base.text import tr

LOCK_FILE = "lock"


@contextlib.contextmanager
def only_grader(folder: Path, waiting: Callable[[str], object] | None = None) -> Iterator[Path]:
    """Hold the lock of ``folder`` while grading, so that no two processes write the same rows.

    Args:
        waiting: called with the number of the process that holds the lock; then this call waits for it.

    Raises:
        UserError: another process holds it, and ``waiting`` is None; the message names the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_FILE
    lock = file_lock(file, mode=0o660)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        other = file.read_text(encoding="ascii", errors="replace")[:20].strip()
        if waiting is not None:
            waiting(other)
            lock.acquire()
    if not lock.is_locked:
        text = tr(
            "another grader (process {pid}) is at work on {folder}: wait until it is done",
            pid=other,
            folder=folder,
        )
        raise UserError(text)
    try:
        file.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield folder
    finally:
        lock.release()
