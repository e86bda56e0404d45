"""What arrived for a lab, wherever it was handed in: nbgrader's exchange, a folder, or the zip that Moodle makes of all submissions.

A source gives :class:`Arrival` objects: whom the source names, when, and the files. Whether that is a student of the course, and which of
several arrivals counts, is decided by :mod:`dlo_lib.grading.collect`. In a folder or zip a student's files are in ``<id>/`` (also
``<id>/<lab>/``), in ``<id>.ipynb``, or called as Moodle does, ``<full name>_<number>_assignsubmission_file_<file>``, with or without a
folder of that name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI
from nbgrader.utils import parse_utc

from dlo_lib.errors import UserError
from dlo_lib.grading.archive import Entry, Refused, clash, entries_of_folder, entries_of_packed
from dlo_lib.grading.course import LabInfo, source_labs
from dlo_lib.grading.handed_in import MOST_BYTES, MOST_FILES, TIMESTAMP
from dlo_lib.grading.intake import MAX_BYTES
from dlo_lib.text import tr

MOODLE = re.compile(r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_(?P<kind>file|onlinetext)(?:_(?P<rest>.*))?")
EXCHANGE_FILES = (TIMESTAMP, "submission_secret.txt")  # which no student made

Files = dict[str, bytes]  # path below the submission's folder → content


@dataclass(frozen=True)
class Arrival:
    """One submission as its source has it.

    Attributes:
        claimed: the student as the source names them: an id, or in Moodle a full name.
        source: where it is, for people.
        submitted: when, in UTC without a zone, as nbgrader writes times; None when the source does not say.
        full_name: ``claimed`` is a person's name, not an id.
        refused: why it is not taken, when the source knows that already.
    """

    claimed: str
    source: str
    submitted: datetime | None
    entries: tuple[Entry, ...]
    full_name: bool = False
    refused: str = ""
    notes: tuple[str, ...] = field(default=())

    def files(self) -> Files:
        """Every file of the submission, within nbgrader's and our limits; what lies beside the notebooks is left out above them.

        Raises:
            Refused: it cannot be taken; nothing of it should be.
        """
        if self.refused:
            raise Refused(self.refused)
        if reason := clash(list(self.entries)):
            raise Refused(reason)
        files: Files = {}
        number, size = 0, 0
        for entry in sorted(self.entries, key=lambda entry: not entry.parts[-1].endswith(".ipynb")):
            notebook = entry.parts[-1].endswith(".ipynb")
            if not notebook and (number == MOST_FILES or size >= MOST_BYTES):
                raise Refused(tr("more than {number} files or {size} MB beside the notebook", number=MOST_FILES, size=MOST_BYTES >> 20))
            content = entry.read(MAX_BYTES if notebook else MOST_BYTES - size)
            number, size = number + (not notebook), size + (0 if notebook else len(content))
            files["/".join(entry.parts)] = content
        return _notebook_on_top(_unpacked(files))


def _unpacked(files: Files) -> Files:
    """With the notebook that a student packed: out of the only zip there is, when it holds one notebook. The zip stays beside it."""
    packed = [name for name in files if name.lower().endswith(".zip")]
    if len(packed) != 1 or any(name.endswith(".ipynb") for name in files):
        return files
    try:
        found = [entry for entry in entries_of_packed(packed[0], files[packed[0]]) if entry.parts[-1].endswith(".ipynb")]
    except UserError:
        return files  # no zip that anybody should open: the inventory says that there is no notebook
    if len(found) != 1 or clash(found):
        return files
    return {**files, found[0].parts[-1]: found[0].read(MAX_BYTES)}


def _notebook_on_top(files: Files) -> Files:
    """A single notebook in a folder of the student's is brought up: only the top is looked at."""
    notebooks = [name for name in files if name.endswith(".ipynb")]
    if len(notebooks) != 1 or "/" not in notebooks[0]:
        return files
    return {name.rsplit("/", 1)[1] if name == notebooks[0] else name: content for name, content in files.items()}


# -- nbgrader's exchange


def from_exchange(course: NbGraderAPI, lab: LabInfo) -> list[Arrival]:
    """All submissions of ``lab`` in the exchange, earlier ones too. One that another Unix user wrote is refused, as is a bad name.

    Raises:
        UserError: the exchange has no inbound folder of this course that can be read.
    """
    settings = course.exchange.Collect(coursedir=course.coursedir, authenticator=course.authenticator, parent=course)
    inbound = Path(settings.root) / course.coursedir.course_id / "inbound"
    try:
        names = sorted(os.listdir(inbound))
    except OSError as error:
        cure = tr("release the lab first, or say where the submissions are with --from")
        raise UserError(f"{inbound}: {error.strerror}; {cure}") from error
    arrivals = []
    for name in names:
        parts = name.split("+")
        if len(parts) >= 3 and lab.directory in parts[1:]:
            place = len(parts) - 1 - parts[::-1].index(lab.directory)  # a user name may hold a plus
            arrivals.append(_of_exchange(inbound / name, "+".join(parts[:place]), parts[place + 1 :], settings.check_owner))
    return arrivals


def _of_exchange(folder: Path, student: str, rest: list[str], check_owner: bool) -> Arrival:
    refused, submitted = "", None
    try:
        submitted = utc_time(rest[0])
    except (IndexError, ValueError):
        refused = tr("its name holds no time of submission")
    if not folder.is_dir() or folder.is_symlink():
        return Arrival(student, folder.name, submitted, (), refused=tr("it is no folder"))
    owner = _owner(folder)
    if check_owner and owner != student:
        refused = tr("it was written by {owner}; if one account hands in for all, set c.ExchangeCollect.check_owner = False", owner=owner)
    try:
        entries = tuple(entries_of_folder(folder))
    except UserError as error:  # what one student hands in stops nobody else's collection
        return Arrival(student, folder.name, submitted, (), refused=str(error))
    return Arrival(student, folder.name, submitted, entries, refused=refused, notes=tuple(_written_later(folder, entries, submitted)))


def _written_later(folder: Path, entries: Iterable[Entry], submitted: datetime | None) -> list[str]:
    """The time in the name is the student's to write. The change time of a file is not; a restored backup changes it too."""
    if submitted is None:
        return []
    try:
        changed = max(folder.joinpath(*entry.parts).lstat().st_ctime for entry in entries if entry.parts[-1].endswith(".ipynb"))
    except (ValueError, OSError):
        return []
    late = changed - submitted.replace(tzinfo=UTC).timestamp()
    return [tr("written {hours:.1f} hours after the time it states", hours=late / 3600)] if late > 600 else []


def _owner(folder: Path) -> str:
    try:
        return folder.owner()
    except (KeyError, OSError):
        return tr("an unknown user")


def utc_time(text: str) -> datetime:
    """A time as nbgrader writes it, without a zone.

    Raises:
        ValueError: it is none.
    """
    try:
        return parse_utc(text.strip()).replace(tzinfo=None)
    except Exception as error:  # the parser raises whatever comes to it
        raise ValueError(text) from error


# -- a folder or a zip


def from_entries(entries: list[Entry], lab: LabInfo, is_student: Callable[[str], bool]) -> list[Arrival]:
    """The submissions among the files of a folder or zip, one a student as they are named there, in the order of the names."""
    groups: dict[tuple[str, bool, str], list[Entry]] = {}
    other_labs = {other.directory for other in source_labs()} - {lab.directory}
    for entry in _without_wrapper(entries, is_student):
        top, *below = entry.parts
        found = MOODLE.fullmatch(top)
        if found is not None:
            if found["kind"] == "onlinetext":
                continue  # what was typed into Moodle's own editor: no notebook
            inside = tuple(below) or (found["rest"] or top,)
            key = (found["name"], True, f"{found['name']} ({found['number']})")
        elif len(below) > 1 and below[0] in other_labs:
            continue
        elif below:
            inside = tuple(below[1:] if len(below) > 1 and below[0] == lab.directory else below)
            key = (top, False, top)
        else:
            name = top.removesuffix(".ipynb")
            inside, key = ((lab.notebook,) if name != top and is_student(name) else (top,)), (name, False, top)
        groups.setdefault(key, []).append(Entry(inside, entry.written, entry.read))
    return [
        Arrival(claimed, source, _stated(own, full_name), tuple(own), full_name) for (claimed, full_name, source), own in groups.items()
    ]


def _without_wrapper(entries: list[Entry], is_student: Callable[[str], bool]) -> list[Entry]:
    """Without the one folder that packing a folder puts around everything."""
    tops = {entry.parts[0] for entry in entries}
    deep = all(len(entry.parts) > 2 or MOODLE.fullmatch(entry.parts[-1]) for entry in entries)
    if len(tops) != 1 or not deep or MOODLE.fullmatch(top := next(iter(tops))) or is_student(top):
        return entries
    return [Entry(entry.parts[1:], entry.written, entry.read) for entry in entries]


def _stated(entries: list[Entry], from_moodle: bool) -> datetime | None:
    """When Moodle got the newest file; elsewhere the time in ``timestamp.txt``, which to Moodle a student may have handed in."""
    for entry in () if from_moodle else entries:
        if entry.parts == (TIMESTAMP,):
            try:
                return utc_time(entry.read(200).decode("utf-8"))
            except (Refused, ValueError):
                break
    dates = [entry.written for entry in entries if entry.written is not None] if from_moodle else []
    return max(dates).astimezone(UTC).replace(tzinfo=None) if dates else None
