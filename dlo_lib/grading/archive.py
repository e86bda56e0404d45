"""The files of a folder or of a zip, read so that neither can do harm: nothing is unpacked, and nothing is believed that a header says.

A name that leaves the archive (absolute, ``..``, a drive, a link) is refused with the whole archive: no learning platform writes such a
one. What one student can cause, a file that is too large or unreadable, or names that are one name on another file system, is refused for
that student alone, by whoever reads it. Cost: each file is read once, never more than ``limit`` bytes of it.
"""

from __future__ import annotations

import io
import os
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

from dlo_lib.errors import UserError
from dlo_lib.text import tr

MOST_ENTRIES = 100_000
MOST_BYTES = 8 << 30  # of a whole archive, unpacked
MOST_PARTS, LONGEST_PART, LONGEST_PATH = 20, 200, 1000  # bytes, of a path below the archive: a system takes 4096 of a whole one
LEFT_BY_SYSTEMS = ("__MACOSX", ".DS_Store", "Thumbs.db", "desktop.ini", ".ipynb_checkpoints", "__pycache__")


class Refused(Exception):
    """A file or a submission is not taken; the text says why."""


@dataclass(frozen=True)
class Entry:
    """A file: its path in parts, when it was written (None: not known), and ``read(limit)``, which raises :class:`Refused`."""

    parts: tuple[str, ...]
    written: datetime | None
    read: Callable[[int], bytes]


@contextmanager
def opened(path: Path) -> Iterator[list[Entry]]:
    """The files of the folder or zip at ``path``, in the order of their names; they can be read until the block ends.

    Raises:
        UserError: it is neither, or it is an archive that nobody should unpack; the reason is named.
    """
    if path.is_dir():
        yield entries_of_folder(path)
        return
    if not path.is_file():
        raise UserError(tr("nothing at {path}: give a folder, or the zip that Moodle made", path=path))
    try:
        with zipfile.ZipFile(path) as archive:
            yield _entries_of_zip(path, archive)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(tr("{path} is not a zip that can be read: {reason}", path=path, reason=error)) from error


def entries_of_packed(name: str, content: bytes) -> list[Entry]:
    """The files of a zip that is held in memory.

    Raises:
        UserError: as :func:`opened`.
    """
    try:
        return _entries_of_zip(Path(name), zipfile.ZipFile(io.BytesIO(content)))
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(tr("{path} is not a zip that can be read: {reason}", path=name, reason=error)) from error


def entries_of_folder(folder: Path) -> list[Entry]:
    """The files below ``folder``. Links, and folders that cannot be looked into, are entries that cannot be read.

    Raises:
        UserError: there are more than anybody should read.
    """
    entries: list[Entry] = []

    def closed(error: OSError) -> None:
        path = Path(str(error.filename))
        entries.append(Entry(path.relative_to(folder).parts or (folder.name,), None, partial(_closed, path.name, error)))

    for directory, names, files in os.walk(folder, onerror=closed):
        inner = Path(directory).relative_to(folder).parts
        links = [name for name in names if Path(directory, name).is_symlink()]
        unwalked = names[:] if len(inner) >= MOST_PARTS else links  # the deep ones are refused for their names: see `clash`
        names[:] = sorted(name for name in names if name not in (*LEFT_BY_SYSTEMS, *unwalked))
        found = sorted({*files, *unwalked} - set(LEFT_BY_SYSTEMS))
        entries += [Entry((*inner, name), None, partial(read_regular, Path(directory, name))) for name in found]
        if len(entries) > MOST_ENTRIES:
            raise UserError(tr("more than {number} files in {path}", number=MOST_ENTRIES, path=folder))
    return entries


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file: no link is followed, no pipe waited for.

    Raises:
        Refused: it is something else, cannot be read, or holds more than ``limit`` bytes.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Refused(tr("{name} is not a regular file", name=shown(path.name)))
            content = file.read(limit + 1)
    except OSError as error:
        reason = tr("it is a link") if path.is_symlink() else error.strerror
        raise Refused(tr("{name} cannot be read: {reason}", name=shown(path.name), reason=reason)) from error
    return _within(content, limit, path.name)


def _closed(name: str, error: OSError, limit: int) -> bytes:
    raise Refused(tr("{name} cannot be read: {reason}", name=shown(name), reason=error.strerror))


def same_name(name: str) -> str:
    """``name`` as a file system sees it that knows neither case nor composed characters."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def clash(entries: list[Entry]) -> str | None:
    """Why these files cannot lie in one folder everywhere, or None."""
    for entry in entries:
        sizes = [len(part.encode("utf-8", "replace")) for part in entry.parts]
        if len(sizes) > MOST_PARTS or max(sizes) > LONGEST_PART or sum(sizes) > LONGEST_PATH:
            return tr("a file's name is too long: {name}", name=shown(entry.parts[-1]))
    seen: dict[tuple[str, ...], str] = {}
    folders: set[tuple[str, ...]] = set()
    for entry in entries:
        key, name = tuple(map(same_name, entry.parts)), "/".join(entry.parts)
        if key in seen or key in folders or any(key[:depth] in seen for depth in range(1, len(key))):
            other = next((shown for known, shown in seen.items() if known == key[: len(known)] or key == known[: len(key)]), name)
            return tr("two files have the same name on some systems: {one} and {other}", one=shown(other), other=shown(name))
        seen[key] = name
        folders |= {key[:depth] for depth in range(1, len(key))}
    return None


def _entries_of_zip(path: Path, archive: zipfile.ZipFile) -> list[Entry]:
    infos = archive.infolist()
    if len(infos) > MOST_ENTRIES:
        raise UserError(tr("more than {number} files in {path}", number=MOST_ENTRIES, path=path))
    # A header that states less than there is does not help: zipfile reads no more than is stated, and then finds a wrong checksum.
    if sum(info.file_size for info in infos) > MOST_BYTES:
        raise UserError(tr("{path} unpacks to more than {size} GiB: it is not taken", path=path, size=MOST_BYTES >> 30))
    entries = []
    for info in infos:
        parts = _parts(path, info)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise UserError(
                tr("{path} holds {name}, which is no file but a link or a device: it is not taken", path=path, name=shown(info.filename))
            )
        if not info.is_dir() and parts and not set(parts) & set(LEFT_BY_SYSTEMS):
            entries.append(Entry(parts, _date(info), partial(_read_member, archive, info)))
    return sorted(entries, key=lambda entry: entry.parts)


def _parts(path: Path, info: zipfile.ZipInfo) -> tuple[str, ...]:
    name = info.orig_filename if "\0" in info.orig_filename else info.filename
    parts = PurePosixPath(name.replace("\\", "/")).parts
    reason = ""
    if name.startswith(("/", "\\")) or name[1:2] == ":":
        reason = tr("an absolute path")
    elif ".." in parts:
        reason = tr("a path out of the archive")
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        reason = tr("a name with control characters")
    if reason:
        raise UserError(tr("{path} holds {name}, {reason}: it is not taken", path=path, name=shown(name), reason=reason))
    return parts


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    name = PurePosixPath(info.filename).name
    if info.flag_bits & 1:
        raise Refused(tr("{name} is encrypted", name=shown(name)))
    try:
        with archive.open(info) as member:
            content = member.read(limit + 1)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise Refused(tr("{name} is damaged in the zip: {reason}", name=shown(name), reason=error)) from error
    return _within(content, limit, name)


def _within(content: bytes, limit: int, name: str) -> bytes:
    if len(content) > limit:
        raise Refused(tr("{name} is larger than {size} MB: clear the outputs and hand it in again", name=shown(name), size=limit >> 20))
    return content


def _date(info: zipfile.ZipInfo) -> datetime | None:
    try:
        written = datetime(*info.date_time)
    except ValueError:
        return None
    return written if written.year > 1980 else None  # 1980 is what a zip says that was given no date


def shown(name: str) -> str:
    """A name that somebody chose as a terminal, a table or a page may show it: nothing that moves the cursor or turns the line around."""
    return "".join(character if character.isprintable() else "?" for character in name)[:120]
