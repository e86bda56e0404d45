"""Durations in SLURM's formats: ``[days-]hours:minutes:seconds``, ``minutes`` or ``minutes:seconds``."""

from __future__ import annotations

import re
from datetime import timedelta

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr


def parse_duration(text: str | timedelta) -> timedelta:
    """Return a duration, rounded up to whole seconds.

    >>> parse_duration("1-06:00:00") == parse_duration("30:00:00") == timedelta(hours=30)
    True
    >>> parse_duration("90") == parse_duration("90:00") == timedelta(minutes=90)
    True

    Raises:
        UserError: the text has another form, or the duration is 0.
    """
    seconds = 0
    if isinstance(text, timedelta):
        seconds = -(-text // timedelta(seconds=1))
    elif found := re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", str(text).strip()):
        parts = [int(part) for part in found[2].split(":")]
        units = (3600, 60, 1) if found[1] or len(parts) == 3 else (60, 1)
        seconds = int(found[1] or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units))
    if seconds <= 0:
        raise UserError(
            tr(
                'time is "{time}": write it as hours:minutes:seconds, such as "2:30:00", or in minutes',
                time=text,
            )
        )
    return timedelta(seconds=seconds)


def slurm_duration(length: timedelta) -> str:
    """Return a duration in the form of SLURM's ``--time``.

    >>> slurm_duration(timedelta(days=1, minutes=5))
    '24:05:00'
    """
    seconds = int(length.total_seconds())
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def short_duration(length: timedelta) -> str:
    """Return a duration in a short form, for a sentence or a table.

    >>> [short_duration(timedelta(seconds=seconds)) for seconds in (59, 90, 7200, 9000)]
    ['59 s', '1 min 30 s', '2 h', '2 h 30 min']
    """
    seconds = int(length.total_seconds())
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    parts = [(hours, "h"), (minutes, "min"), (rest if hours == 0 else 0, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"
