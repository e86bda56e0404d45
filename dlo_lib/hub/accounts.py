"""Unix accounts for a class, from the table of its roster: ``dlo roster accounts users.csv``, as root.

An account that exists stays as it is, so the command can be repeated when students join. New accounts have
closed homes (mode 0700) and a random password, which a file of root holds until it has been handed out.
"""

from __future__ import annotations

import csv
import io
import os
import pwd
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.hub.read_settings import NAME
from dlo_lib.hub.settings import HubSettings

FIRST_USER = 1000
"""Accounts with lower numbers belong to the system (``UID_MIN`` of login.defs)."""
PASSWORD_BYTES = 9  # 12 characters


@dataclass(frozen=True)
class Accounts:
    """The result: which accounts were created, and which existed before."""

    created: tuple[str, ...]
    known: tuple[str, ...]


def create_accounts(names: Sequence[str], passwords: Path) -> Accounts:
    """Create the missing Unix accounts of ``names``, and write their passwords to a new file.

    Args:
        names: ids of a roster.
        passwords: the file, in CSV with a header; only root can read it. It is not written if no account is
            missing.

    Raises:
        UserError: a name is no name of a Unix account, or is that of an account of the system; the caller is
            not root; the file exists; or the machine refuses an account. Accounts created before that stay,
            and their passwords are in the file.
    """
    known = {name: _number(name) for name in names}
    _check(known)
    missing = [name for name, number in known.items() if number is None]
    if not missing:
        return Accounts((), tuple(known))
    if os.geteuid() != 0:
        raise UserError(tr("only root can create accounts: sudo dlo roster accounts FILE"))
    try:
        handle = os.open(passwords, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        text = "{file} holds passwords already: hand them out and remove it, or give another --passwords"
        raise UserError(tr(text, file=passwords)) from None
    except OSError as error:
        raise UserError(
            tr("cannot write {file} ({reason})", file=passwords, reason=error.strerror)
        ) from error
    with open(handle, "w", encoding="ascii") as file:
        file.write(_line("id", "password"))
        for name in missing:
            password = secrets.token_urlsafe(PASSWORD_BYTES)
            _run(["useradd", "--create-home", "-K", "HOME_MODE=0700", "--shell", "/bin/bash", name], name)
            _run(["chpasswd"], name, f"{name}:{password}\n")
            file.write(_line(name, password))
            file.flush()  # an account without its password would have to be made anew
    return Accounts(tuple(missing), tuple(name for name, number in known.items() if number is not None))


def require_accounts(settings: HubSettings) -> None:
    """Check that the people in ``hub.toml`` have accounts: the Hub does not start with a name without one.

    Raises:
        UserError: one has none; the message has the command that creates the account.
    """
    people = dict.fromkeys(settings.admins, "admins")
    for course in settings.courses:
        listed = () if isinstance(course.students, str) else course.students
        people |= dict.fromkeys(listed, f"students of {course.name}")
        people |= dict.fromkeys(course.graders, f"graders of {course.name}")
    for name, where in people.items():
        if not has_account(name.lower()):  # the Hub's names have lower case
            text = "{file}: {name} in {where} has no account here: adduser {name}, or remove the name"
            raise UserError(tr(text, file=settings.file, name=name.lower(), where=where))


def has_account(name: str) -> bool:
    """Return whether there is a Unix account ``name``."""
    return _number(name) is not None


def system_account(name: str) -> bool:
    """Return whether ``name`` is root or another account of the system, which no person logs in as."""
    number = _number(name)
    return number is not None and number < FIRST_USER


def _number(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError: a zero byte
        return None


def _check(known: dict[str, int | None]) -> None:
    unfit = [name for name in known if not NAME.fullmatch(name)]
    if unfit:
        text = (
            "no names of Unix accounts: {names}: write ids of lower-case letters, digits, - and _ that begin "
            "with a letter"
        )
        raise UserError(tr(text, names=", ".join(unfit)))
    if taken := [name for name, number in known.items() if number is not None and number < FIRST_USER]:
        text = "accounts of the system: {names}: choose other ids for these students"
        raise UserError(tr(text, names=", ".join(taken)))


def _run(command: list[str], name: str, text: str = "") -> None:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(tr("no {program} here: apt-get install passwd", program=command[0])) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [tr("no output")])[-1]
        text = "cannot create the account {name} ({said}): mend it, and repeat the command for the others"
        raise UserError(tr(text, name=name, said=said))


def _line(*values: str) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(values)
    return written.getvalue()
