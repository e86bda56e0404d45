"""Read files that another user may change meanwhile: links are not followed, and no path is trusted twice.

A folder of the exchange belongs to a student, who can replace a file or a folder by a link after the walk has
found it. So every level is opened relative to the descriptor of the level above it, without following links,
and what was opened is examined: its kind, its owner, and that it is what the walk found. Cost: each file is
read once, up to ``limit`` bytes; a folder is opened twice.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

MOST_ENTRIES = 100_000
MOST_PARTS = 20
LEFT_BY_SYSTEMS = ("__MACOSX", ".DS_Store", "Thumbs.db", "desktop.ini", ".ipynb_checkpoints", "__pycache__")
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class Refused(Exception):
    """A file or a submission is refused; the text gives the reason."""


@dataclass(frozen=True)
class ArchiveMember:
    """A file of an archive or of a folder.

    Args:
        parts: the parts of its path.
        written: when it was written, or None if that is unknown.
        read: ``read(limit)`` returns the content; raises :class:`Refused`.
        regular: False for a link, a pipe, a socket or a device.
        changed: the time of its last change in seconds since 1970, which its owner cannot set; None in a zip.
    """

    parts: tuple[str, ...]
    written: datetime | None
    read: Callable[[int], bytes]
    regular: bool = True
    changed: float | None = None


@dataclass(frozen=True)
class OpenedFolder:
    """A folder, identified when it is first opened.

    Args:
        path: its place; only its last part may belong to another user.
        identity: its device and inode.
        owner: the number of the user to whom it belongs.
        same_owner: whether everything in it must belong to the same user.
    """

    path: Path
    identity: tuple[int, int]
    owner: int
    same_owner: bool

    @classmethod
    def at(cls, path: Path, same_owner: bool = False) -> OpenedFolder:
        """Return the folder at ``path``.

        Raises:
            OSError: it is no folder (a link is none), or it is unreadable.
        """
        handle = os.open(path, _FOLDER)
        try:
            found = os.fstat(handle)
        finally:
            os.close(handle)
        return cls(path, (found.st_dev, found.st_ino), found.st_uid, same_owner)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the folder.

        Raises:
            OSError: it is unreadable.
            Refused: another folder is in its place.
        """
        handle = os.open(self.path, _FOLDER)
        try:
            found = os.fstat(handle)
            if (found.st_dev, found.st_ino) != self.identity:
                raise Refused(_changed(self.path.name))
            yield handle
        finally:
            os.close(handle)

    def entries(self, most: int = MOST_ENTRIES) -> list[ArchiveMember]:
        """Return the files below the folder. Links, folders of other users and unreadable folders are members
        whose ``read`` raises.

        Raises:
            OSError: the folder is unreadable.
            Refused: another folder is in its place.
            UserError: there are more than ``most`` files and folders.
        """
        found: list[ArchiveMember] = []
        with self.opened() as handle:
            self._walk(handle, (), found, _Count(most, self.path))
        return found

    def _walk(self, handle: int, inner: tuple[str, ...], found: list[ArchiveMember], count: _Count) -> None:
        names = []
        with os.scandir(handle) as entries:
            for entry in entries:
                count.one_more()
                if entry.name not in LEFT_BY_SYSTEMS:
                    names.append(entry.name)
        folders = []
        for name in sorted(names):
            parts = (*inner, name)
            try:
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
            except OSError as error:
                found.append(ArchiveMember(parts, None, partial(_closed, name, error)))
                continue
            # A folder that is too deep is not entered; `name_conflict` refuses it because of its length.
            if stat.S_ISDIR(status.st_mode) and len(inner) < MOST_PARTS:
                folders.append(name)
                continue
            regular = stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR)
            read = partial(self._read, parts, _state(status))
            found.append(ArchiveMember(parts, None, read, regular, status.st_ctime))
        for name in folders:
            try:
                below = os.open(name, _FOLDER, dir_fd=handle)
            except OSError as error:
                found.append(ArchiveMember((*inner, name), None, partial(_closed, name, error)))
                continue
            try:
                self._require_owner(below, name)
                self._walk(below, (*inner, name), found, count)
            except Refused as error:
                found.append(ArchiveMember((*inner, name), None, partial(_refuse, error)))
            finally:
                os.close(below)

    def _read(self, parts: tuple[str, ...], state: tuple[int, ...], limit: int) -> bytes:
        """Return the content of the file below the folder that the walk found in this state."""
        name, above = parts[-1], parts[:-1]
        try:
            with self.opened() as handle:
                levels = [os.dup(handle)]
                try:
                    for part in above:
                        levels.append(os.open(part, _FOLDER, dir_fd=levels[-1]))
                        self._require_owner(levels[-1], part)
                    levels.append(os.open(name, _FILE, dir_fd=levels[-1]))
                    self._require_owner(levels[-1], name)
                    content = _content(levels[-1], name, limit)
                    if _state(os.fstat(levels[-1])) != state:
                        raise Refused(_changed(name))
                    return content
                finally:
                    for level in levels:
                        os.close(level)
        except OSError as error:
            raise _unreadable(name, error) from error

    def _require_owner(self, handle: int, name: str) -> None:
        if self.same_owner and os.fstat(handle).st_uid != self.owner:
            text = "{name} belongs to another user than the folder of the submission"
            raise Refused(tr(text, name=printable(name)))


class _Count:
    """Counts the entries of a folder."""

    def __init__(self, most: int, path: Path) -> None:
        self.number, self.most, self.path = 0, most, path

    def one_more(self) -> None:
        self.number += 1
        if self.number > self.most:
            raise UserError(tr("more than {number} files in {path}", number=self.most, path=self.path))


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file in a folder of this user; a link is not followed, and a pipe does
    not block.

    Raises:
        Refused: it is no regular file, is unreadable, or has more than ``limit`` bytes.
    """
    try:
        handle = os.open(path, _FILE)
    except OSError as error:
        raise _unreadable(path.name, error) from error
    try:
        return _content(handle, path.name, limit)
    finally:
        os.close(handle)


def _content(handle: int, name: str, limit: int) -> bytes:
    """Return the content of an open file.

    Raises:
        Refused: it is no regular file, is unreadable, or has more than ``limit`` bytes.
    """
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise Refused(tr("{name} is not a regular file", name=printable(name)))
    if status.st_size > limit:  # nothing of it is read
        raise too_large(name, limit)
    try:
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise _unreadable(name, error) from error
    if len(content) > limit:
        raise too_large(name, limit)
    return content


def too_large(name: str, limit: int) -> Refused:
    """Return the refusal of a file with more than ``limit`` bytes."""
    text = "{name} is larger than {size} MB: clear the outputs and submit it again"
    return Refused(tr(text, name=printable(name), size=limit >> 20))


def printable(name: str) -> str:
    """Replace unprintable characters of a name, such as those that move a cursor or change the text
    direction.
    """
    return "".join(character if character.isprintable() else "?" for character in name)[:120]


def _state(status: os.stat_result) -> tuple[int, ...]:
    """Return what differs if a file was replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _unreadable(name: str, error: OSError) -> Refused:
    reason = tr("it is a link") if error.errno in (errno.ELOOP, errno.EMLINK) else error.strerror
    return Refused(tr("{name} cannot be read: {reason}", name=printable(name), reason=reason))


def _changed(name: str) -> str:
    text = "{name} changed while it was collected: collect again"
    return tr(text, name=printable(name))


def _closed(name: str, error: OSError, limit: int) -> bytes:
    raise _unreadable(name, error)


def _refuse(reason: Refused, limit: int) -> bytes:
    raise reason
