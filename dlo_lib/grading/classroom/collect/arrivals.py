"""Read the submissions of a lab from nbgrader's exchange, from a folder, or from the zip that Moodle makes.

A source yields :class:`Incoming` objects: the student as the source names them, the time, and the files.
:mod:`dlo_lib.grading.classroom.collect.collection` decides whether this is a student of the course, and which
of several submissions counts. In a folder or zip, the files of a student are in ``<id>/`` or ``<id>/<lab>/``,
in ``<id>.ipynb``, or named as Moodle names them, ``<full name>_<number>_assignsubmission_file_<file>``, with
or without a folder of that name.
"""

from __future__ import annotations

import os
import pwd
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.submission_copy import MOST_BYTES, MOST_FILES, TIMESTAMP
from dlo_lib.grading.classroom.roster.archive import entries_of_zip_bytes, name_conflict
from dlo_lib.grading.classroom.roster.course_access import keep_entries
from dlo_lib.grading.classroom.roster.safe_files import ArchiveMember, OpenedFolder, Refused
from dlo_lib.grading.judge.intake import MAX_BYTES
from dlo_lib.grading.lab.course import LabInfo, source_labs
from dlo_lib.grading.lab.times import UnknownZone, utc_time

MOODLE = re.compile(
    r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_(?P<kind>file|onlinetext)(?:_(?P<rest>.*))?"
)
MOST_WALKED = 2_000  # files and folders of a submission that are looked at
MOST_OF_A_STUDENT = 20_000  # the same in all submissions of a lab
EXCHANGE_FILES = (TIMESTAMP, "submission_secret.txt")  # written by nbgrader, not by the student

Files = dict[str, bytes]  # path below the submission's folder → content


@dataclass(frozen=True)
class Incoming:
    """One submission in its source.

    Attributes:
        claimed: the student as the source names them: an id, or a full name in Moodle.
        source: its place, for messages.
        submitted: the time in UTC without a zone, as nbgrader writes times; None if the source has none.
        entries: its files.
        full_name: ``claimed`` is a full name, not an id.
        refused: the reason why it is refused, if the source already has one.
        notes: lines for the inventory.
        replaces: the time of the student's submission before this one, if the source has one.
        later: the student's last submission, if it is late and this one, which was on time, counts.
    """

    claimed: str
    source: str
    submitted: datetime | None
    entries: tuple[ArchiveMember, ...]
    full_name: bool = False
    refused: str = ""
    notes: tuple[str, ...] = field(default=())
    replaces: datetime | None = None
    later: Incoming | None = None

    def without_links(self) -> tuple[Incoming, list[str]]:
        """Return the submission without links, pipes and devices, and their names, if it has a notebook that
        is a regular file. Otherwise one of them may be in place of the notebook, and they stay.
        """
        special = ["/".join(entry.parts) for entry in self.entries if not entry.regular]
        if not any(entry.regular and entry.parts[-1].endswith(".ipynb") for entry in self.entries):
            return self, []
        return replace(self, entries=tuple(entry for entry in self.entries if entry.regular)), special

    def files(self) -> Files:
        """Return every file of the submission, within the limits of nbgrader and of this library.

        Raises:
            Refused: the submission exceeds a limit or has an unreadable file; none of its files is taken.
        """
        if self.refused:
            raise Refused(self.refused)
        if reason := name_conflict(list(self.entries)):
            raise Refused(reason)
        notebooks = [entry for entry in self.entries if entry.parts[-1].endswith(".ipynb")]
        others = [entry for entry in self.entries if not entry.parts[-1].endswith(".ipynb")]
        most = tr(
            "more than {number} files or {size} MB beside the notebook",
            number=MOST_FILES,
            size=MOST_BYTES >> 20,
        )
        if max(len(notebooks) - 1, 0) + len(others) > MOST_FILES:
            raise Refused(most)
        files: Files = {}
        left = MAX_BYTES  # of all notebooks together: a sparse file takes nothing of the student's disk
        for entry in notebooks:
            files["/".join(entry.parts)] = content = entry.read(left)
            left -= len(content)
        left = MOST_BYTES
        for entry in others:
            if left <= 0:
                raise Refused(most)
            files["/".join(entry.parts)] = content = entry.read(left)
            left -= len(content)
        return _notebook_on_top(_unpacked(files))


def _unpacked(files: Files) -> Files:
    """Add the notebook inside a student's zip, if there is one zip with one notebook. The zip stays beside
    it.
    """
    packed = [name for name in files if name.lower().endswith(".zip")]
    if len(packed) != 1 or any(name.endswith(".ipynb") for name in files):
        return files
    try:
        entries = entries_of_zip_bytes(packed[0], files[packed[0]])
        found = [entry for entry in entries if entry.parts[-1].endswith(".ipynb")]
    except UserError:
        return files  # unsafe: the inventory then reports that there is no notebook
    if len(found) != 1 or name_conflict(found):
        return files
    return {**files, found[0].parts[-1]: found[0].read(MAX_BYTES)}


def _notebook_on_top(files: Files) -> Files:
    """Move a single notebook from a subfolder to the top, because only the top is searched."""
    notebooks = [name for name in files if name.endswith(".ipynb")]
    if len(notebooks) != 1 or "/" not in notebooks[0]:
        return files
    return {
        name.rsplit("/", 1)[1] if name == notebooks[0] else name: content for name, content in files.items()
    }


# -- nbgrader's exchange


def from_exchange(course: NbGraderAPI, lab: LabInfo) -> list[Incoming]:
    """Return all submissions of ``lab`` in the exchange, earlier ones too.

    A submission written by another Unix user, or with a bad name, is returned as refused.

    Raises:
        UserError: the exchange has no readable inbound folder of this course.
    """
    settings = course.exchange.Collect(
        coursedir=course.coursedir, authenticator=course.authenticator, parent=course
    )
    inbound = Path(settings.root) / course.coursedir.course_id / "inbound"
    try:
        names = sorted(os.listdir(inbound))
    except OSError as error:
        cure = tr("release the lab first, or say where the submissions are with --from")
        raise UserError(f"{inbound}: {error.strerror}; {cure}") from error
    for shared in (inbound, Path(settings.root)):  # of a release before this rule
        keep_entries(shared)
    arrivals, walked = [], Counter[str]()
    for name in names:
        parts = name.split("+")
        if len(parts) >= 3 and lab.directory in parts[1:]:
            place = len(parts) - 1 - parts[::-1].index(lab.directory)  # a user name may hold a plus
            arrivals.append(
                _of_exchange(
                    inbound / name,
                    "+".join(parts[:place]),
                    parts[place + 1 :],
                    settings.check_owner,
                    settings.timezone,
                    walked,
                )
            )
    return arrivals


def _of_exchange(
    folder: Path, student: str, rest: list[str], check_owner: bool, zone: str, walked: Counter[str]
) -> Incoming:
    """Return the submission in ``folder``.

    Args:
        walked: the number of files of each student that were found before; counts those of this folder too.
    """
    refused, submitted = "", None
    try:
        submitted = utc_time(_stamped(rest), zone)
    except UnknownZone as error:
        refused = str(error)
    except (IndexError, ValueError):
        refused = tr("its name has no time of submission")
    try:
        opened = OpenedFolder.at(folder, same_owner=True)
    except OSError:
        return Incoming(student, folder.name, submitted, (), refused=tr("it is no folder that can be read"))
    if check_owner and (owner := _user_name(opened.owner)) != student:
        text = "written by {owner}; if one account submits for all, set c.ExchangeCollect.check_owner = False"
        refused = tr(text, owner=owner)
    if refused:  # a folder that another user wrote must not count as the student's
        return Incoming(student, folder.name, submitted, (), refused=refused)
    try:
        entries = tuple(opened.entries(min(MOST_WALKED, MOST_OF_A_STUDENT - walked[student])))
    except (OSError, Refused, UserError) as error:  # one student's files must not stop the collection
        return Incoming(student, folder.name, submitted, (), refused=str(error))
    walked[student] += len(entries)
    notes = tuple(_written_later(entries, submitted))
    return Incoming(student, folder.name, submitted, entries, notes=notes)


def _stamped(rest: list[str]) -> str:
    """Return the time in the rest of a folder's name, which was split at plus signs: a zone may hold one."""
    zone_follows = len(rest) > 1 and rest[0].endswith(" ") and rest[1][:4].isdigit()
    return f"{rest[0]}+{rest[1]}" if zone_follows else rest[0]


def _written_later(entries: Iterable[ArchiveMember], submitted: datetime | None) -> list[str]:
    """Return a note if a notebook changed more than 10 minutes after its stated time.

    A student can write any time into the name, but cannot set the change time of a file. Restoring a backup
    also changes it.
    """
    times = (entry.changed for entry in entries if entry.parts[-1].endswith(".ipynb"))
    changed = max((time for time in times if time is not None), default=None)
    if submitted is None or changed is None:
        return []
    if submitted > datetime.now(UTC).replace(tzinfo=None) + timedelta(minutes=10):
        return [tr("the time that it states is in the future")]
    late = changed - submitted.replace(tzinfo=UTC).timestamp()
    return [tr("written {hours:.1f} hours after the time it states", hours=late / 3600)] if late > 600 else []


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return tr("an unknown user")


# -- a folder or a zip


def from_entries(
    entries: list[ArchiveMember],
    lab: LabInfo,
    is_student: Callable[[str], bool],
) -> list[Incoming]:
    """Return the submissions among the files of a folder or zip, one per student name, sorted by name."""
    groups: dict[tuple[str, bool, str], list[ArchiveMember]] = {}
    other_labs = {other.directory for other in source_labs()} - {lab.directory}
    for entry in _without_wrapper(entries, is_student):
        top, *below = entry.parts
        found = MOODLE.fullmatch(top)
        if found is not None:
            if found["kind"] == "onlinetext":
                continue  # text from Moodle's editor, not a notebook
            inside = tuple(below) or (found["rest"] or top,)
            key = (found["name"], True, f"{found['name']} ({found['number']})")
        elif len(below) > 1 and below[0] in other_labs:
            continue
        elif below:
            inside = tuple(below[1:] if len(below) > 1 and below[0] == lab.directory else below)
            key = (top, False, top)
        else:
            name = top.removesuffix(".ipynb")
            inside, key = (
                ((lab.notebook,) if name != top and is_student(name) else (top,)),
                (name, False, top),
            )
        groups.setdefault(key, []).append(replace(entry, parts=inside))
    submissions = []
    for (claimed, full_name, source), own in groups.items():
        submissions.append(Incoming(claimed, source, _stated(own, full_name), tuple(own), full_name))
    return submissions


def _without_wrapper(entries: list[ArchiveMember], is_student: Callable[[str], bool]) -> list[ArchiveMember]:
    """Remove the single top folder that packing a folder adds."""
    tops = {entry.parts[0] for entry in entries}
    deep = all(len(entry.parts) > 2 or MOODLE.fullmatch(entry.parts[-1]) for entry in entries)
    if len(tops) != 1 or not deep or MOODLE.fullmatch(top := next(iter(tops))) or is_student(top):
        return entries
    return [replace(entry, parts=entry.parts[1:]) for entry in entries]


def _stated(entries: list[ArchiveMember], from_moodle: bool) -> datetime | None:
    """Return the date of the newest file in a zip of Moodle; otherwise the time in ``timestamp.txt``.

    In Moodle, a student may have submitted a ``timestamp.txt``.
    """
    for entry in () if from_moodle else entries:
        if entry.parts == (TIMESTAMP,):
            try:
                return utc_time(entry.read(200).decode("utf-8"))
            except (Refused, ValueError):
                break
    dates = [entry.written for entry in entries if entry.written is not None] if from_moodle else []
    return max(dates).astimezone(UTC).replace(tzinfo=None) if dates else None
