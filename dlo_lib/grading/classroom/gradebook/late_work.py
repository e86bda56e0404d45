"""Late work beside work that was on time: both are kept, and commands name both.

A submission after the due date does not replace one before it, unless the course file has ``replaces = true``
under ``[late]``. The collection puts it into ``collected/<lab>/late/<student>/<time>/``, and the inventory,
the results and the export name it until it counts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.deadlines import Deadlines
from dlo_lib.grading.classroom.gradebook.submission_copy import TIMESTAMP
from dlo_lib.grading.classroom.roster.safe_files import Refused, read_regular
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.times import how_late, utc_time

COLLECTED = "collected"
NAME = "%Y%m%dT%H%M%SZ"


def stamp(folder: Path) -> datetime | None:
    """Return the time of the submission in ``folder``, in UTC without a zone; None if it states none."""
    try:
        return utc_time(read_regular(folder / TIMESTAMP, 200).decode())
    except (Refused, ValueError):
        return None


def late_folder(course: Path, lab: LabInfo, student: str, submitted: datetime) -> Path:
    """Return the folder for the late submission of ``student`` that does not count."""
    return course / COLLECTED / lab.directory / "late" / student / submitted.strftime(NAME)


def late_notes(course: Path, submitted: Path, lab: LabInfo, student: str, deadlines: Deadlines) -> list[str]:
    """Return a sentence about a late submission of ``student`` that does not count.

    Args:
        submitted: the folder of the submission that counts.
    """
    folder = course / COLLECTED / lab.directory / "late" / student
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    counts = stamp(submitted)
    if not found or counts is None:
        return []
    time = stamp(found[-1])
    if time is None or time <= counts:
        return []
    shown = f"{time.replace(tzinfo=UTC).astimezone(deadlines.file.zone):%Y-%m-%d %H:%M %Z}"
    seconds = deadlines.seconds_late(student, time)
    place = found[-1].relative_to(course)
    if not seconds or deadlines.rule.replaces:
        text = "{student}: the submission of {time} in {folder} counts now: `dlo collect {lab}` takes it"
        return [tr(text, student=student, time=shown, folder=place, lab=lab.directory)]
    text = (
        "{student}: the submission of {time}, {late} late, is kept in {folder}; the one that was on time "
        "counts ([late] replaces = true in {file} changes that)"
    )
    late = how_late(seconds)
    return [tr(text, student=student, time=shown, late=late, folder=place, file=deadlines.file.path.name)]
