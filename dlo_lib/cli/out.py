"""The file that an option ``--out`` names: bad places are refused in one line, before the work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr


def require_writable(file: Path) -> None:
    """Check that ``file`` can be written.

    Raises:
        UserError: it is a folder, its folder is a file or closed, or the file system is read-only.
    """
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if file.is_dir():
        raise _refused(file, tr("it is a folder"))
    if not folder.is_dir():
        raise _refused(file, tr("{folder} is no folder", folder=folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refused(file, tr("you may not write to {folder}", folder=folder))


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Refuse what the operating system refuses in the block, which writes ``file``.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise _refused(file, error.strerror or str(error)) from error


def _refused(file: Path, reason: str) -> UserError:
    return UserError(
        tr("cannot write {file} ({reason}): choose another file with --out", file=file, reason=reason)
    )
