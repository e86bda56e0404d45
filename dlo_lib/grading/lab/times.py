"""Times of submissions, in UTC.

nbgrader writes ``2026-11-20 11:00:00.5 UTC``, or with ``Exchange.timezone`` the abbreviation of another zone,
and reads both with a parser that takes ``+0200`` for 200 seconds and an unknown abbreviation for UTC. Five
minutes late can then become two hours early. This module reads offsets, names such as ``Europe/Paris``, and
an abbreviation only if the exchange's zone, or a zone of this name (CET, EST), has it at that time.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dlo_lib.base.text import tr

DEADLINES_FILE = "dlo-deadlines.json"
"""In a course's folder of the exchange: the due dates that students see."""
FORMAT = "%Y-%m-%d %H:%M:%S.%f UTC"
WRITTEN = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)[ T](?P<clock>\d\d:\d\d(?::\d\d)?)(?:\.(?P<fraction>\d{1,9}))?"
    r"\s*(?P<zone>\S*)"
)
OFFSET = re.compile(r"(?:UTC|GMT)?(?P<sign>[+-])(?P<hours>\d\d):?(?P<minutes>\d\d)?")
ZERO = ("", "Z", "UTC", "GMT")


class UnknownZone(ValueError):
    """The zone of a time is not known; the message is for the instructor."""


def utc_time(text: str, zone: str = "UTC") -> datetime:
    """Return a time as UTC without a zone; a time without a zone is UTC.

    Args:
        zone: the zone in which the exchange writes times, for abbreviations such as CEST.

    Raises:
        UnknownZone: several places use this abbreviation, or none does.
        ValueError: ``text`` is no time.

    >>> utc_time("2026-07-01 12:00:00 +0200")
    datetime.datetime(2026, 7, 1, 10, 0)
    """
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    local = datetime.fromisoformat(f"{found['day']} {found['clock']}")
    if found["fraction"]:
        local += timedelta(microseconds=int(found["fraction"][:6].ljust(6, "0")))
    there = local.replace(tzinfo=_zone(found["zone"], local, zone))
    try:
        return there.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:  # in UTC it lies after the year 9999 or before the year 1
        raise ValueError(text) from None


def _zone(name: str, local: datetime, own: str) -> tzinfo:
    if name.upper() in ZERO:
        return UTC
    if offset := OFFSET.fullmatch(name.upper()):
        minutes = 60 * int(offset["hours"]) + int(offset["minutes"] or 0)
        return timezone(timedelta(minutes=minutes if offset["sign"] == "+" else -minutes))
    for known in (own, name):
        try:
            there = ZoneInfo(known)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            continue
        if ("/" in name and known == name) or local.replace(tzinfo=there).tzname() == name:
            return there
    cure = tr("set c.Exchange.timezone to UTC, or write an offset such as +0200")
    raise UnknownZone(tr("the time zone {name} is not known: {cure}", name=name, cure=cure))


def how_late(seconds: float) -> str:
    """Return a span of time in its two largest units, rounded down; at least a minute.

    >>> how_late(30), how_late(7_500), how_late(180_000)
    ('1 min', '2 h 5 min', '2 d 2 h')
    """
    minutes = max(1, int(seconds) // 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [(days, tr("d")), (hours, tr("h")), (minutes, tr("min"))]
    first = next(place for place, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)
