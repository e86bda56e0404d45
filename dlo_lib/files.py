"""Atomic writes: write a temporary file, sync it, then rename it, so that a file is complete or absent."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlo_lib.errors import UserError, no_space


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success sync it and rename it to ``path``, otherwise
    remove it.

    Raises:
        UserError: the disk or quota is full. ``path`` is then unchanged.
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
    """Raise the ``OSError`` of a full disk or quota, which safetensors reports only in the
    text of its exception."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if f"(os error {number})" in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` atomically."""
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def state_dir() -> Path:
    """Return ``$DLO_HOME`` or a folder in the state folder of the user, for progress, gradebooks and caches.

    The folder is created if it does not exist.

    Raises:
        UserError: the folder cannot be created.
    """
    chosen = os.environ.get("DLO_HOME")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return own_folder(Path(chosen).expanduser() if chosen else Path(state) / "dlo", "DLO_HOME")


def own_folder(folder: Path, variable: str) -> Path:
    """Return ``folder``; create it if it does not exist.

    Raises:
        UserError: the folder cannot be created; the message names the ``variable`` that selects another one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create the folder {folder} ({error.strerror}): set {variable} to a folder of yours"
        ) from error
    return folder


def cache_dir() -> Path:
    """Return ``$DLO_CACHE`` or a folder in :func:`state_dir`, for files that can be recreated, such as text
    corpora.

    The folder is created if it does not exist.
    """
    chosen = os.environ.get("DLO_CACHE")
    return own_folder(Path(chosen).expanduser() if chosen else state_dir() / "cache", "DLO_CACHE")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
