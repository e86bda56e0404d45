"""Read the files of a zip or a folder safely: nothing is unpacked, and no header is trusted.

An archive with a name that leaves it (absolute, ``..``, a drive, a link) is refused as a whole, because no
learning platform writes one. Faults that one student can cause are refused for that student alone, when the
files are read: a file that is too large or unreadable, or names that are equal on some file systems. Cost:
each file is read once, up to ``limit`` bytes.
"""

from __future__ import annotations

import io
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.roster.safe_files import (
    LEFT_BY_SYSTEMS,
    MOST_ENTRIES,
    MOST_PARTS,
    ArchiveMember,
    OpenedFolder,
    Refused,
    printable,
    too_large,
)

MOST_BYTES = 8 << 30  # of the content of a whole archive
MOST_LISTING = 1 << 20  # bytes of the list of files in a student's zip, 46 and a name for each
_LONGEST_END = 22 + 65_535 + 20  # bytes of the record at the end of a zip, with its comment
LONGEST_PART, LONGEST_PATH = 200, 1000  # bytes; Linux allows 255 and 4096


@contextmanager
def open_archive(path: Path) -> Iterator[list[ArchiveMember]]:
    """Yield the files of the folder or zip at ``path``, sorted by name; they are readable until the block
    ends.

    Raises:
        UserError: ``path`` is neither, or the archive is unsafe; the message gives the reason.
    """
    if path.is_dir():
        try:
            entries = OpenedFolder.at(path.resolve()).entries()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        yield entries
        return
    if not path.is_file():
        raise UserError(tr("nothing at {path}: give a folder, or the zip that Moodle made", path=path))
    try:
        with zipfile.ZipFile(path) as archive:
            yield _entries_of_zip(path, archive)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(
            tr("{path} is not a zip that can be read: {reason}", path=path, reason=error)
        ) from error


def entries_of_zip_bytes(name: str, content: bytes) -> list[ArchiveMember]:
    """Return the files of a student's zip in memory.

    Raises:
        UserError: as :func:`open_archive`, or its list of files is too long to be read.
    """
    if _listing_bytes(content) > MOST_LISTING:
        raise UserError(tr("the list of files of {path} is too long", path=name))
    try:
        return _entries_of_zip(Path(name), zipfile.ZipFile(io.BytesIO(content)))
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(
            tr("{path} is not a zip that can be read: {reason}", path=name, reason=error)
        ) from error


def _listing_bytes(content: bytes) -> int:
    """Return the size of a zip's list of files, which :mod:`zipfile` reads whole; 0 if there is none."""
    end = content.rfind(b"PK\5\6", -_LONGEST_END)
    size = content[end + 12 : end + 16]
    return int.from_bytes(size, "little") if end >= 0 else 0


def fold_name(name: str) -> str:
    """Normalise ``name`` as a file system does that ignores case and the composition of characters."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def name_conflict(entries: list[ArchiveMember]) -> str | None:
    """Return the reason why these files cannot be in one folder on every file system, or None."""
    for entry in entries:
        sizes = [len(part.encode("utf-8", "replace")) for part in entry.parts]
        if len(sizes) > MOST_PARTS or max(sizes) > LONGEST_PART or sum(sizes) > LONGEST_PATH:
            return tr("a file's name is too long: {name}", name=printable(entry.parts[-1]))
    seen: dict[tuple[str, ...], str] = {}
    folders: set[tuple[str, ...]] = set()
    for entry in entries:
        key, name = tuple(map(fold_name, entry.parts)), "/".join(entry.parts)
        if key in seen or key in folders or any(key[:depth] in seen for depth in range(1, len(key))):
            other = next(
                (
                    shown
                    for known, shown in seen.items()
                    if known == key[: len(known)] or key == known[: len(key)]
                ),
                name,
            )
            return tr(
                "two files have the same name on some systems: {one} and {other}",
                one=printable(other),
                other=printable(name),
            )
        seen[key] = name
        folders |= {key[:depth] for depth in range(1, len(key))}
    return None


def _entries_of_zip(path: Path, archive: zipfile.ZipFile) -> list[ArchiveMember]:
    infos = archive.infolist()
    if len(infos) > MOST_ENTRIES:
        raise UserError(tr("more than {number} files in {path}", number=MOST_ENTRIES, path=path))
    # A false size in a header has no effect: zipfile reads no more bytes, and the checksum is then wrong.
    if sum(info.file_size for info in infos) > MOST_BYTES:
        raise UserError(
            tr("{path} unpacks to more than {size} GiB: it is not taken", path=path, size=MOST_BYTES >> 30)
        )
    entries = []
    for info in infos:
        parts = _parts(path, info)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise UserError(
                tr(
                    "{path} contains {name}, which is a link or a device: it is not taken",
                    path=path,
                    name=printable(info.filename),
                )
            )
        if not info.is_dir() and parts and not set(parts) & set(LEFT_BY_SYSTEMS):
            entries.append(ArchiveMember(parts, _date(info), partial(_read_member, archive, info)))
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
        raise UserError(
            tr(
                "{path} holds {name}, {reason}: it is not taken",
                path=path,
                name=printable(name),
                reason=reason,
            )
        )
    return parts


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    name = PurePosixPath(info.filename).name
    if info.flag_bits & 1:
        raise Refused(tr("{name} is encrypted", name=printable(name)))
    try:
        with archive.open(info) as member:
            content = member.read(limit + 1)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise Refused(
            tr("{name} is damaged in the zip: {reason}", name=printable(name), reason=error),
        ) from error
    if len(content) > limit:
        raise too_large(name, limit)
    return content


def _date(info: zipfile.ZipInfo) -> datetime | None:
    try:
        written = datetime(*info.date_time)
    except ValueError:
        return None
    return written if written.year > 1980 else None  # 1980 is the default of a zip without dates
