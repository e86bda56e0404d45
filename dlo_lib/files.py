"""Files that are whole or absent: everything is written aside, synced, then renamed into place."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlo_lib.errors import no_space


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is synced and renamed to ``path``, else removed.

    Raises:
        UserError: the disk or quota is full. ``path`` is then as it was before.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        with open(aside, "rb+") as file:
            os.fsync(file.fileno())
        aside.chmod(0o666 & ~_umask())
        os.replace(aside, target)
    except OSError as error:
        if known := no_space(target, error):
            raise known from error
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def full_disk_as_os_error() -> Iterator[None]:
    """Around what safetensors writes: a full disk or quota, which it says in words only, is raised as the ``OSError`` that it was."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if f"(os error {number})" in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path``, whole or not at all."""
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def state_dir() -> Path:
    """``$DLO_HOME``, else the user's state folder: progress, gradebooks, caches. Made when it does not exist."""
    chosen = os.environ.get("DLO_HOME")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(chosen).expanduser() if chosen else Path(state) / "dlo"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_dir() -> Path:
    """``$DLO_CACHE``, else a folder of :func:`state_dir`: what can be made again, such as text corpora. Made when it does not exist."""
    chosen = os.environ.get("DLO_CACHE")
    folder = Path(chosen).expanduser() if chosen else state_dir() / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
