"""Read ``hub.toml`` and check each key and value, so that a mistake gives one line with its cure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.duration import parse_duration
from dlo_lib.hub.settings import (
    HubCourse,
    HubLimits,
    HubSettings,
    KubernetesServers,
    LtiPlatform,
    SlurmServers,
)

KINDS = ("local", "slurm", "kubernetes")
NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
"""A Unix account, and a course: its name is part of folders, URLs and names of Hub groups."""
NO_ACCOUNTS = {"email": "an address", "sub": "a number of Moodle", "name": "a full name"}
_SIZE = re.compile(r"[1-9]\d*[KMGT]")


def read_settings(file: str | Path) -> HubSettings:
    """Read and check ``hub.toml``.

    Raises:
        UserError: the file is not readable, or a key or a value is wrong; the message names the cure.
    """
    file = Path(file)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(tr("no file {file}: copy deploy/hub/hub.toml there and edit it", file=file)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(tr("{file} is not a readable TOML file: {error}", file=file, error=error)) from error
    try:
        return _settings(values, file)
    except _Wrong as error:
        raise UserError(f"{file}: {error}") from error


class _Wrong(Exception):
    """A wrong value, as a sentence with its cure."""


def _settings(values: dict[str, Any], file: Path) -> HubSettings:
    tables = {"limits": HubLimits, "slurm": SlurmServers, "kubernetes": KubernetesServers, "lti": LtiPlatform}
    values = dict(values)
    courses = values.pop("course", None)
    if not isinstance(courses, list) or not courses or not all(isinstance(one, dict) for one in courses):
        raise _Wrong('no course: add a table [[course]] with name = "deep26", account, folder and graders')
    made: dict[str, Any] = {
        name: _table(kind, values.pop(name), f"[{name}]") for name, kind in tables.items() if name in values
    }
    made["courses"] = tuple(
        _table(HubCourse, {"port": 9000 + number, **one}, f"[[course]] {one.get('name', number + 1)}")
        for number, one in enumerate(courses)
    )
    settings = _table(HubSettings, {**values, **made, "file": file}, "the file")
    for key in ("slurm", "kubernetes"):
        if (settings.kind == key) != (getattr(settings, key) is not None):
            given = settings.kind == key
            raise _Wrong(
                f'kind is "{key}", but there is no table [{key}]: add it'
                if given
                else f'there is a table [{key}], but kind is "{settings.kind}": remove it or change kind'
            )
    _distinct(settings)
    _unix_names(settings)
    return settings


def _unix_names(settings: HubSettings) -> None:
    """Refuse claims of a launch that are never Unix accounts."""
    if settings.lti is not None and settings.kind != "kubernetes" and settings.lti.username in NO_ACCOUNTS:
        reason = NO_ACCOUNTS[settings.lti.username]
        raise _Wrong(
            f'username in [lti] is "{settings.lti.username}", which is {reason} and no Unix account: write '
            '"custom_login", and in Moodle the custom parameter login=$User.username of the tool'
        )


def _distinct(settings: HubSettings) -> None:
    for key in ("name", "account", "folder", "checkout", "port"):
        seen: dict[object, str] = {}
        for course in settings.courses:
            value = getattr(course, key)
            if value in seen:
                raise _Wrong(
                    f"the courses {seen[value]} and {course.name} have the same {key} ({value}): "
                    "each course needs a separate one"
                )
            seen[value] = course.name
    accounts = {course.account for course in settings.courses}
    for course in settings.courses:
        people = {*course.graders, *(course.students if isinstance(course.students, tuple) else ())}
        if both := sorted(people & accounts):
            raise _Wrong(f"{both[0]} is the account of a course and also a person: use two accounts")


def _table(kind: Any, values: object, where: str) -> Any:
    if not isinstance(values, dict):
        raise _Wrong(f"{where} is not a table: write its keys below a line {where}")
    known = {option.name: option for option in fields(kind)}
    shown = [name for name in known if name not in ("courses", "file")]
    for name in values:
        if name not in known:
            raise _Wrong(f"{unknown_name(f'key in {where}', name, shown)}")
    absent = [
        name
        for name, option in known.items()
        if name not in values and option.default is MISSING and option.default_factory is MISSING
    ]
    if absent:
        raise _Wrong(f"{where} lacks {', '.join(absent)}: deploy/hub/README.md describes each key")
    checked = {}
    for name, value in values.items():
        if (check := _CHECKS.get((kind, name)) or _CHECKS.get(str(known[name].type))) is None:
            checked[name] = value  # a table that is checked already
            continue
        try:
            checked[name] = check(value)
        except (ValueError, UserError) as error:
            raise _Wrong(f"{name} in {where} is {value!r}: {error}") from None
    return kind(**checked)


def _fails(reason: str) -> ValueError:
    return ValueError(f"it must be {reason}")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _fails("a text in quotation marks")
    return value


def _absolute(value: object) -> Path:
    path = Path(_text(value)) if not isinstance(value, Path) else value
    if not path.is_absolute():
        raise _fails('a full path, such as "/srv/hub"')
    return path


def _name(value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise _fails("a name of lower-case letters, digits, - and _ that begins with a letter")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise _fails('a list of users, such as ["ada", "blaise"]')
    return tuple(value)


def _students(value: object) -> str | tuple[str, ...]:
    if value == "roster":
        return "roster"
    try:
        return _names(value)
    except ValueError:
        raise _fails('"roster" or a list of users') from None


def _whole(least: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or value < least:
            raise _fails(f"a whole number, at least {least}")
        return value

    return check


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _fails("a number above 0")
    return float(value)


def _size(value: object) -> str:
    if not isinstance(value, str) or not _SIZE.fullmatch(value):
        raise _fails('a size, such as "2G" or "800M"')
    return value


def _kind(value: object) -> str:
    if value not in KINDS:
        raise _fails(f"one of {', '.join(KINDS)}")
    return str(value)


def _url(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/]+\S*", value):
        raise _fails('a URL, such as "https://hub.example.org"')
    return value.rstrip("/")


def _each(check: Callable[[Any], Any], shape: str) -> Callable[[object], tuple[Any, ...]]:
    def checked(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise _fails(shape)
        return tuple(check(one) for one in value)

    return checked


_CHECKS: dict[Any, Callable[[Any], Any]] = {
    "str": _text,
    "Path": _absolute,
    "tuple[str, ...]": _names,
    "int": _whole(1),
    "timedelta": parse_duration,
    (HubSettings, "kind"): _kind,
    (HubSettings, "address"): _url,
    (HubSettings, "file"): Path,
    (HubCourse, "name"): _name,
    (HubCourse, "account"): _name,
    (HubCourse, "students"): _students,
    (HubLimits, "memory"): _size,
    (HubLimits, "processors"): _positive,
    (SlurmServers, "times"): _each(parse_duration, 'a list of times, such as ["1:00:00", "4:00:00"]'),
    (SlurmServers, "gpus"): _each(_whole(0), "a list of whole numbers, such as [0, 1]"),
    (LtiPlatform, "issuer"): _url,
    (LtiPlatform, "authorize_url"): _url,
    (LtiPlatform, "keys_url"): _url,
}
