"""The file of the gradebook: it is checked before it is used, and copied before a command changes it.

nbgrader creates missing tables in whatever file it opens, so an empty file in place of a lost gradebook would
look like a course without students. The copies are numbered, in ``gradebook-backups/`` of the course. Courses
whose gradebook is in another database than SQLite have neither.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sqlite3
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI
from sqlalchemy.engine import make_url

from dlo_lib.base.errors import UserError, causes_of
from dlo_lib.base.text import tr

BACKUPS = "gradebook-backups"
MOST_BACKUPS = 30
LOCK_SECONDS = 60.0  # another program, such as formgrader, may hold the gradebook for that long
NAME = re.compile(r"gradebook-(\d+)\.db")


def patient_url(url: str) -> str:
    """Return the address of the gradebook with a wait for a lock of up to ``LOCK_SECONDS``."""
    if _file(url) is None:
        return url
    return make_url(url).update_query_dict({"timeout": str(LOCK_SECONDS)}).render_as_string(False)


def is_locked(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is a gradebook that another program holds."""
    return any("database is locked" in str(one) for one in causes_of(error))


def is_full(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is a full disk or quota; SQLite reports it in words."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return any(getattr(one, "errno", None) in full or "disk is full" in str(one) for one in causes_of(error))


def locked_gradebook(folder: Path) -> UserError:
    """Return the error for a gradebook that another program holds."""
    text = "another program holds the gradebook of {folder}: end it, or wait, then try again"
    return UserError(tr(text, folder=folder))


def require_gradebook(course: NbGraderAPI) -> None:
    """Check that the gradebook of ``course`` is whole.

    Raises:
        UserError: it is missing, empty, damaged or locked; the message names the newest backup.
    """
    file = _file(course.coursedir.db_url)
    if file is None:
        return
    folder = Path(course.coursedir.root)
    backups = _backups(folder)
    fault = _fault(file)
    if not fault and not _students(file) and backups and (lost := _students(backups[-1])):
        fault = tr("has no students, although its newest backup has {number}", number=lost)
    if fault:
        text = tr("the gradebook {file} {fault}", file=file, fault=fault)
        if backups:
            cure = tr("restore its newest backup: cp {backup} {file}", backup=backups[-1], file=file)
        else:
            cure = tr("it has no backup; to begin with an empty one, remove it and run `dlo course` again")
        raise UserError(f"{text}: {cure}")


def back_up(course: NbGraderAPI) -> Path | None:
    """Copy the gradebook before it is changed; return the copy, or None if there is nothing to copy.

    A copy that equals the newest one is not kept, and only the newest ``MOST_BACKUPS`` are.

    Raises:
        UserError: as :func:`require_gradebook`.
    """
    file = _file(course.coursedir.db_url)
    if file is None:
        return None
    require_gradebook(course)
    folder = Path(course.coursedir.root)
    before = _backups(folder)
    number = int(NAME.fullmatch(before[-1].name)[1]) + 1 if before else 1  # type: ignore[index]
    (folder / BACKUPS).mkdir(exist_ok=True)
    target = folder / BACKUPS / f"gradebook-{number:04d}.db"
    partial = target.with_suffix(".partial")
    partial.touch(0o660)
    with _opened(file) as source, contextlib.closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
    if before and partial.read_bytes() == before[-1].read_bytes():
        partial.unlink()
        return before[-1]
    partial.replace(target)
    for old in before[: len(before) + 1 - MOST_BACKUPS]:
        old.unlink()
    return target


def _file(url: str) -> Path | None:
    """Return the SQLite file of the gradebook; None if it is in another database."""
    address = make_url(url)
    known = address.get_backend_name() == "sqlite" and address.database not in (None, "", ":memory:")
    return Path(str(address.database)) if known else None


def _backups(folder: Path) -> list[Path]:
    """Return the backups, the newest last."""
    if not (folder / BACKUPS).is_dir():
        return []
    return sorted(path for path in (folder / BACKUPS).iterdir() if NAME.fullmatch(path.name))


def _fault(file: Path) -> str:
    """Return what is wrong with the file, or nothing.

    Raises:
        UserError: another program holds it.
    """
    if not file.is_file():
        return tr("is missing")
    if not file.stat().st_size:
        return tr("is empty")
    try:
        with _opened(file) as gradebook:
            said = gradebook.execute("PRAGMA quick_check").fetchone()[0]
            tables = {name for (name,) in gradebook.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error as error:
        if is_locked(error):
            raise locked_gradebook(file.parent) from error
        return tr("is damaged ({reason})", reason=error)
    if said != "ok":
        return tr("is damaged ({reason})", reason=str(said).splitlines()[0])
    return "" if {"student", "grade", "assignment"} <= tables else tr("has no tables of nbgrader")


def _students(file: Path) -> int:
    with contextlib.suppress(sqlite3.Error), _opened(file) as gradebook:
        return int(gradebook.execute("SELECT count(*) FROM student").fetchone()[0])
    return 0


def _opened(file: Path) -> contextlib.closing[sqlite3.Connection]:
    """Open the file for reading.

    It is opened for writing where that is allowed, because a program that was killed while it wrote leaves a
    journal, and SQLite undoes the unfinished change before it reads.
    """
    uri = f"{file.resolve().as_uri()}?mode=rw"
    return contextlib.closing(sqlite3.connect(uri, uri=True, timeout=LOCK_SECONDS))
