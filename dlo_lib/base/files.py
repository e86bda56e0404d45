"""Files and folders of the user: a file is complete or absent, and a folder is closed to other users.

Atomic writes: write a temporary file, sync it, then rename it. Folders in a home have the mode 0700, because
they hold answers, and homes are open to all users of a machine by default on many systems.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlo_lib.base.errors import UserError, no_space
from dlo_lib.base.text import tr

PRIVATE, OTHERS = 0o700, 0o077
STATE_PARTS = (
    "cache", "classroom", "copied", "home", "jobs", "jupyter", "output", "progress", "ranks",
)  # fmt: skip
"""What the library creates in the state folder. The private exchange and the copies of the library are not
listed: they hold no answers of a class, and a class may share them."""
_looked_at: set[Path] = set()


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

    The folder is created if it does not exist. Other users of the machine cannot read what is in it.

    Raises:
        UserError: the folder cannot be created.
    """
    chosen = os.environ.get("DLO_HOME")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(chosen).expanduser() if chosen else Path(state) / "dlo"
    own_folder(folder, "DLO_HOME", ours=not chosen)
    if chosen and folder.stat().st_mode & OTHERS:  # perhaps a folder that a project shares
        close(*(folder / part for part in STATE_PARTS))
    return folder


def own_folder(folder: Path, variable: str, ours: bool = False) -> Path:
    """Return ``folder``; create it if it does not exist, with the mode 0700 whatever the umask.

    Args:
        ours: the library chose the name, so :func:`close` an existing folder. The user may share a folder
            that the user has named; it keeps its mode. So does the target of a link.

    Raises:
        UserError: the folder cannot be created; the message names the ``variable`` that selects another one.
    """
    try:
        made = not folder.is_dir()
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if made:
            folder.chmod(folder.stat().st_mode & stat.S_ISGID | PRIVATE)  # a umask may have removed more
    except OSError as error:
        raise UserError(
            f"cannot create the folder {folder} ({error.strerror}): set {variable} to a folder of yours"
        ) from error
    if ours:
        close(folder)
    return folder


def close(*folders: Path) -> None:
    """Close those of ``folders`` whose mode lets other users in, and print one line that names them.

    A folder that does not exist, belongs to another user, or is a link stays unchanged. Each folder is looked
    at once in a process.
    """
    closed = [str(folder) for folder in folders if folder not in _looked_at and _closed(folder)]
    if closed:
        text = "closed to other users of this machine (mode 700): {folders}"
        print(tr(text, folders=", ".join(closed)), file=sys.stderr)


def _closed(folder: Path) -> bool:
    """Remove the rights of group and others; return whether there were any."""
    try:
        state = folder.lstat()
    except OSError:
        return False  # it does not exist
    _looked_at.add(folder)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or not state.st_mode & OTHERS:
        return False
    try:
        folder.chmod(stat.S_IMODE(state.st_mode) & ~OTHERS)
    except OSError as error:
        text = "other users of this machine can read {folder}: it cannot be closed ({reason})"
        print(tr(text, folder=folder, reason=error.strerror), file=sys.stderr)
        return False
    return True


def open_to_others(folder: Path) -> bool:
    """Return whether modes let other users of the machine, of any group, read or enter ``folder``."""
    above = (parent.stat().st_mode & 0o011 for parent in folder.resolve().parents)
    return folder.is_dir() and bool(folder.stat().st_mode & OTHERS) and all(above)


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
