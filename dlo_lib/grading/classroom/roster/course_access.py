"""Access to a course's folder: its grader's alone (mode 0700), or that of a group of graders (mode 2770).

The folder holds the gradebook, the names and notebooks of all students, and the secret of the class, and it
links to the solutions. A folder that other users of the machine can enter is refused before each command. In
a shared course, new files belong to the group and can be written by it, also those of nbgrader.
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr

PRIVATE, SHARED = 0o700, 0o2770
SHARED_UMASK = 0o007


def create_folder(folder: Path, group: str | None = None) -> None:
    """Create the folder of a course, or restrict an existing one to its grader or to ``group``.

    A group also gets the files that are already there.

    Raises:
        UserError: there is no such group, or this user cannot give the folder to it.
    """
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    if group is not None:
        _share(folder, group)
    elif not is_shared(folder) or open_to_others(folder):
        folder.chmod(SHARED if is_shared(folder) else PRIVATE)
    enter_course(folder)


def enter_course(folder: Path) -> None:
    """Check that only graders can enter ``folder``; in a shared course, let the group write new files.

    Raises:
        UserError: other users of the machine can enter it.
    """
    if is_shared(folder):
        os.umask(SHARED_UMASK)
    if open_to_others(folder) or (not is_shared(folder) and _reachable(folder, 0o010)):
        text = "other users of this machine can read the course in {folder}: {cure}"
        cure = "chmod o= " if is_shared(folder) else "chmod 700 "
        raise UserError(tr(text, folder=folder, cure=f"{cure}{folder}"))


def open_to_others(folder: Path) -> bool:
    """Return whether users of the machine who are not in the folder's group can enter it."""
    return _reachable(folder, 0o001)


def is_shared(folder: Path) -> bool:
    """Return whether a group of graders shares the course, which the set-group-ID bit of its folder says."""
    return bool(folder.stat().st_mode & stat.S_ISGID) and bool(folder.stat().st_mode & stat.S_IWGRP)


def keep_entries(folder: Path) -> None:
    """Set the sticky bit of a folder of the exchange to which all students write, so that a student cannot
    rename or remove the submission of another. nbgrader creates it without this bit. A folder of another user
    stays unchanged, because only its owner can set the bit.
    """
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        folder.chmod(stat.S_IMODE(found.st_mode) | stat.S_ISVTX)


def _reachable(folder: Path, bit: int) -> bool:
    """Return whether users that ``bit`` stands for (others, or others in the group) can enter ``folder``."""
    entered = (parent.stat().st_mode & (0o001 | bit) for parent in folder.resolve().parents)
    return bool(folder.stat().st_mode & (bit | bit << 2)) and all(entered)


def _share(folder: Path, group: str) -> None:
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise unknown_name("group", group, (known.gr_name for known in grp.getgrall())) from None
    try:
        for place, _, files in os.walk(folder):
            os.chown(place, -1, number)
            os.chmod(place, SHARED)
            for file in (Path(place, name) for name in files):
                if not file.is_symlink():
                    os.chown(file, -1, number)
                    file.chmod(file.stat().st_mode & ~0o007 | 0o060)
    except PermissionError as error:
        text = (
            "cannot give {file} to the group {group}: only its owner, if a member of the group, or root can"
        )
        raise UserError(tr(text, file=error.filename, group=group)) from error
