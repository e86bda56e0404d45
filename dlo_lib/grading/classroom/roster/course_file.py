"""The course file: due dates, extensions and the rule for late work, in ``course.toml`` of a course's folder.

    timezone = "Europe/Paris"            # of the times below that have no offset

    [late]                               # without this table, late work loses no points
    per_day = "10 %"                     # of the lab's points, or a number of points such as 1
    at_most = "50 %"
    grace = "15 minutes"                 # later than this is late
    closed_after = "7 days"              # later than this earns no points
    replaces = false                     # true: late work replaces work that was on time

    [labs.13_dp_limit]
    due = 2026-11-30T18:00:00
    extensions = { ada = 2026-12-02T18:00:00, blaise = "2 days" }
    late = { per_day = 2 }               # replaces keys of [late] for this lab

    [quiz]
    explain = "after due"                # or "at once", "never": when a page explains a wrong answer

All keys are optional. A time is a TOML date-time, with an offset (``2026-11-30T18:00:00+01:00``) or in
``timezone``; a date alone is the end of that day. An extension is a time or a duration after the due date. A
day is a day of the calendar: two days after Saturday 18:00 are Monday 18:00, also when the clocks change.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.course import find_lab, source_labs

FILE = "course.toml"
EXPLAIN = ("at once", "after due", "never")
EXTENDED = 'a time such as 2026-11-30T18:00:00, or a duration such as "2 days"'
UNITS = {"minute": 60, "min": 60, "hour": 3600, "h": 3600, "day": 86_400, "week": 7 * 86_400}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(minutes?|min|hours?|h|days?|weeks?)")
PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Duration:
    """A time span: whole calendar ``days``, and ``seconds``."""

    days: int = 0
    seconds: float = 0.0

    def after(self, moment: datetime, zone: ZoneInfo) -> datetime:
        """Return the end of the span that begins at ``moment`` (with a zone), in UTC."""
        local = moment.astimezone(zone).replace(tzinfo=None) + timedelta(days=self.days)
        return local.replace(tzinfo=zone).astimezone(UTC) + timedelta(seconds=self.seconds)


@dataclass(frozen=True)
class Amount:
    """A number of points, or a percentage of the points of a lab."""

    value: float
    percent: bool = False

    def of(self, maximum: float) -> float:
        """Return the points, for a lab with ``maximum`` points."""
        return maximum * self.value / 100 if self.percent else self.value

    def __str__(self) -> str:
        if self.percent:
            return f"{self.value:g} %"
        return tr("1 point") if self.value == 1 else tr("{points:g} points", points=self.value)


@dataclass(frozen=True)
class LateRule:
    """What late work loses.

    Attributes:
        per_day: for each day that has begun after the due date.
        at_most: the largest penalty.
        grace: work is not late until this has passed after the due date.
        closed_after: later work earns no points; None: there is no such limit.
        replaces: late work replaces work that was on time.
    """

    per_day: Amount = Amount(0.0)
    at_most: Amount = Amount(100.0, percent=True)
    grace: Duration = Duration()
    closed_after: Duration | None = None
    replaces: bool = False

    @property
    def has_penalty(self) -> bool:
        """Whether late work loses points."""
        return self.per_day.value > 0 or self.closed_after is not None


@dataclass(frozen=True)
class LabDates:
    """The table of one lab: its due date in UTC (with the zone), extensions by student, and its rule."""

    due: datetime | None = None
    extensions: Mapping[str, datetime | Duration] = field(default_factory=lambda: MappingProxyType({}))
    late: LateRule | None = None


@dataclass(frozen=True)
class CourseFile:
    """What the course file says; without a file, nothing is set.

    Attributes:
        path: the file.
        exists: whether there is one.
        zone: the time zone of the course.
        late: the rule for all labs.
        labs: the tables of labs, by directory.
        quiz_explain: one of ``EXPLAIN``: when a page explains a wrong answer of the quiz.
    """

    path: Path
    exists: bool = False
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    late: LateRule = LateRule()
    labs: Mapping[str, LabDates] = field(default_factory=lambda: MappingProxyType({}))
    quiz_explain: str = "after due"

    def of(self, lab: str) -> LabDates:
        """Return the table of the lab in the directory ``lab``; an empty one if there is none."""
        return self.labs.get(lab, LabDates())

    def rule(self, lab: str) -> LateRule:
        """Return the rule for late work of the lab in the directory ``lab``."""
        return self.of(lab).late or self.late


def read_course_file(folder: str | Path) -> CourseFile:
    """Return the course file of the course in ``folder``.

    Raises:
        UserError: the file is not TOML, or a key or a value in it is unknown.
    """
    path = Path(folder) / FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return CourseFile(path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(tr("{file} is not TOML: {reason}", file=path, reason=error)) from error
    except OSError as error:
        raise UserError(tr("{file} cannot be read: {reason}", file=path, reason=error.strerror)) from error
    return _Reader(path).course(table)


class _Reader:
    """Checks the values of one file and converts them; ``where`` names the key in messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.zone: ZoneInfo | None = None

    def course(self, table: Mapping[str, Any]) -> CourseFile:
        self.keys("", table, ("timezone", "late", "labs", "quiz"))
        if "timezone" in table:
            self.zone = self.read_zone(table["timezone"])
        late = self.rule("late", self.table("late", table.get("late", {})), LateRule())
        quiz = self.table("quiz", table.get("quiz", {}))
        self.keys("quiz", quiz, ("explain",))
        explain = quiz.get("explain", "after due")
        if explain not in EXPLAIN:
            raise self.fault("quiz.explain", explain, " | ".join(f'"{one}"' for one in EXPLAIN))
        labs: dict[str, LabDates] = {}
        known = source_labs()
        for name, values in self.table("labs", table.get("labs", {})).items():
            try:
                directory = find_lab(name, known).directory
            except UserError as error:
                raise UserError(f"{self.path}: labs.{name}: {error}") from error
            if directory in labs:
                raise UserError(tr("{file}: {lab} has two tables: remove one", file=self.path, lab=directory))
            labs[directory] = self.lab(f"labs.{name}", self.table(f"labs.{name}", values), late)
        return CourseFile(self.path, True, self.zone or ZoneInfo("UTC"), late, labs, explain)

    def lab(self, where: str, table: Mapping[str, Any], late: LateRule) -> LabDates:
        self.keys(where, table, ("due", "extensions", "late"))
        due = self.moment(f"{where}.due", table["due"]) if "due" in table else None
        extensions: dict[str, datetime | Duration] = {}
        for student, value in self.table(f"{where}.extensions", table.get("extensions", {})).items():
            at = f"{where}.extensions.{student}"
            span = isinstance(value, str) and DURATION.fullmatch(value.strip()) is not None
            extensions[student] = self.duration(at, value) if span else self.moment(at, value, EXTENDED)
            end = extensions[student]
            if isinstance(end, datetime) and due is not None and end < due:
                text = "{file}: {where} ends before the due date: give a later time, or a duration"
                raise UserError(tr(text, file=self.path, where=at))
        if "late" not in table:
            return LabDates(due, extensions)
        return LabDates(
            due, extensions, self.rule(f"{where}.late", self.table(f"{where}.late", table["late"]), late)
        )

    def rule(self, where: str, table: Mapping[str, Any], rule: LateRule) -> LateRule:
        self.keys(where, table, ("per_day", "at_most", "grace", "closed_after", "replaces"))
        if "per_day" in table:
            rule = replace(rule, per_day=self.amount(f"{where}.per_day", table["per_day"]))
        if "at_most" in table:
            rule = replace(rule, at_most=self.amount(f"{where}.at_most", table["at_most"]))
        if "grace" in table:
            rule = replace(rule, grace=self.duration(f"{where}.grace", table["grace"]))
        if "closed_after" in table:
            rule = replace(rule, closed_after=self.duration(f"{where}.closed_after", table["closed_after"]))
        if "replaces" in table:
            if not isinstance(table["replaces"], bool):
                raise self.fault(f"{where}.replaces", table["replaces"], "true | false")
            rule = replace(rule, replaces=table["replaces"])
        return rule

    def amount(self, where: str, value: object) -> Amount:
        if isinstance(value, str) and (found := PERCENT.fullmatch(value.strip())):
            if float(found[1]) <= 100:
                return Amount(float(found[1]), percent=True)
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
            return Amount(float(value))
        raise self.fault(where, value, tr('a number of points such as 1, or a percentage such as "10 %"'))

    def duration(self, where: str, value: object) -> Duration:
        found = DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise self.fault(where, value, tr('a duration such as "15 minutes", "36 hours" or "2 days"'))
        number, unit = float(found[1]), found[2] if found[2] == "h" else found[2].removesuffix("s")
        seconds = number * UNITS[unit]
        if unit in ("day", "week") and seconds % 86_400 == 0:
            return Duration(days=int(seconds) // 86_400)
        return Duration(seconds=seconds)

    def moment(self, where: str, value: object, right: str = "") -> datetime:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # an ISO time in quotation marks
                value = datetime.fromisoformat(value) if len(value) > 10 else date.fromisoformat(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime.combine(value + timedelta(days=1), time())  # the end of that day
        if not isinstance(value, datetime):
            time_only = tr("a time such as 2026-11-30T18:00:00, without quotation marks")
            raise self.fault(where, value, right or time_only)
        if value.tzinfo is not None:
            return value.astimezone(UTC)
        if self.zone is None:
            text = (
                '{file}: {where} has no time zone: add timezone = "Europe/Paris" at the top of the file, '
                "or an offset: {value}+01:00"
            )
            raise UserError(tr(text, file=self.path, where=where, value=value.isoformat()))
        return self.local(where, value, self.zone)

    def local(self, where: str, value: datetime, zone: ZoneInfo) -> datetime:
        """Return a local time in UTC; refuse one that the change of the clocks skips or repeats."""
        first, second = (value.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if first == second:
            return first
        offsets = [(value - moment.replace(tzinfo=None)) for moment in (first, second)]
        both = tr(" or ").join(f"{value.isoformat()}{_offset(offset)}" for offset in offsets)
        skipped = first.astimezone(zone).replace(tzinfo=None) != value
        what = tr("does not exist") if skipped else tr("exists twice")
        text = "{file}: {where}: {value} {what} in {zone}, because the clocks change: write {both}"
        raise UserError(
            tr(text, file=self.path, where=where, value=value, what=what, zone=zone.key, both=both)
        )

    def read_zone(self, name: object) -> ZoneInfo:
        try:
            if not isinstance(name, str):
                raise ValueError
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise self.fault(
                "timezone", name, tr("a name of the IANA database such as Europe/Paris or UTC")
            ) from None

    def table(self, where: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.fault(where, value, tr("a table, [{where}]", where=where))
        return value

    def keys(self, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
        for key in table:
            if key not in known:
                near = get_close_matches(key, list(known), n=1)
                hint = tr("did you mean {name}?", name=near[0]) if near else ", ".join(known)
                text = "{file}: unknown key {key}: {hint}"
                key = f"{where}.{key}" if where else key
                raise UserError(tr(text, file=self.path, key=key, hint=hint))

    def fault(self, where: str, value: object, right: str) -> UserError:
        shown = value.isoformat() if isinstance(value, date | time) else repr(value)
        text = "{file}: {where} is {value}: write {right}"
        return UserError(tr(text, file=self.path, where=where, value=shown[:80], right=right))


def _offset(offset: timedelta) -> str:
    minutes = int(offset.total_seconds()) // 60
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
