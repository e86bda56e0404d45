"""Collect the submissions of a lab: an inventory, a receipt for each submission, and no lost file.

Each submission is matched with the roster by id, or by the full name that Moodle gives. The newest one of a
student counts, as in nbgrader, but late work does not replace work that was on time unless the course file
lets it (:mod:`~dlo_lib.grading.classroom.gradebook.late_work`). It is written to
``submitted/<student>/<lab>/`` atomically; the earlier one moves to ``collected/<lab>/``, as do submissions
that match no student. ``grades/<lab>/inventory.csv`` and ``receipts.csv`` are the same for equal files.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.collect.arrivals import (
    EXCHANGE_FILES,
    Files,
    Incoming,
    from_entries,
    from_exchange,
)
from dlo_lib.grading.classroom.collect.receipt import digest
from dlo_lib.grading.classroom.gradebook.deadlines import Deadlines, settle
from dlo_lib.grading.classroom.gradebook.export import grades_folder
from dlo_lib.grading.classroom.gradebook.gradebook_file import is_full
from dlo_lib.grading.classroom.gradebook.inventory import FILE as INVENTORY
from dlo_lib.grading.classroom.gradebook.inventory import Inventory, Item, ItemState, shown_time
from dlo_lib.grading.classroom.gradebook.late_work import COLLECTED, late_folder, stamp
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import require_release
from dlo_lib.grading.classroom.gradebook.submission_copy import TIMESTAMP
from dlo_lib.grading.classroom.roster.archive import fold_name, open_archive
from dlo_lib.grading.classroom.roster.roster import read_roster
from dlo_lib.grading.classroom.roster.roster_table import Person, id_fault, normalise_name
from dlo_lib.grading.classroom.roster.safe_files import Refused, printable, read_regular
from dlo_lib.grading.judge.grader_lock import only_grader
from dlo_lib.grading.judge.intake import MAX_BYTES, Invalid, find_submission
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.times import FORMAT, how_late

RECEIPTS = "receipts.csv"


def collect(
    course: NbGraderAPI,
    lab: LabInfo,
    source: Path | None = None,
    waiting: Callable[[str], object] | None = None,
) -> Inventory:
    """Collect ``lab`` from nbgrader's exchange, or from the folder or zip ``source``; write and return the
    inventory.

    Args:
        waiting: called with the number of the process that grades the lab, if there is one; then this call
            waits until it is done.

    Raises:
        UserError: the lab was not released in this course, its roster is empty, the source is unreadable
            or an unsafe archive, the course file is wrong, or another process grades the lab and ``waiting``
            is None; nothing has changed. Or the disk is full; what was collected before stays.
    """
    require_release(course, lab)
    roster = read_roster(course)
    if not roster:
        text = "the roster of {folder} is empty: `dlo roster import` comes first"
        raise UserError(tr(text, folder=course.coursedir.root))
    deadlines = settle(course, lab)
    try:
        with only_grader(grades_folder(course, lab), waiting):
            return _collect(course, lab, roster, deadlines, source)
    except (OSError, UserError) as error:
        if not is_full(error):
            raise
        text = (
            "the disk of {folder} is full: free some space and collect again; what was collected before stays"
        )
        raise UserError(tr(text, folder=course.coursedir.root)) from error


def _collect(
    course: NbGraderAPI, lab: LabInfo, roster: list[Person], deadlines: Deadlines, source: Path | None
) -> Inventory:
    collector = _Collector(course, lab, roster, deadlines, exact=source is None)
    if source is None:
        inventory = collector.take(_newest(from_exchange(course, lab), collector.keeps_out))
    else:
        with open_archive(source) as entries:
            inventory = collector.take(from_entries(entries, lab, collector.is_student))
    folder = grades_folder(course, lab)
    write_text(folder / INVENTORY, inventory.csv())
    write_text(folder / RECEIPTS, inventory.receipts())
    return inventory


def _newest(
    arrivals: Iterable[Incoming], keeps_out: Callable[[str, datetime | None], bool]
) -> list[Incoming]:
    """Return the submission of each student that counts, and all refused ones.

    Args:
        keeps_out: whether a submission of a student at a time must not replace an earlier one.
    """
    taken: dict[str, Incoming] = {}
    refused = []
    for arrival in sorted(arrivals, key=lambda arrival: (arrival.submitted or datetime.min, arrival.source)):
        before = taken.get(arrival.claimed)
        if arrival.refused:
            refused.append(arrival)
        elif before is None or keeps_out(arrival.claimed, before.submitted):
            taken[arrival.claimed] = replace(arrival, replaces=before.submitted if before else None)
        elif keeps_out(arrival.claimed, arrival.submitted):
            taken[arrival.claimed] = replace(before, later=arrival)
        else:
            taken[arrival.claimed] = replace(arrival, replaces=before.submitted)
    return [*taken.values(), *refused]


class _Collector:
    """Writes submissions to the folders of their students."""

    def __init__(
        self, course: NbGraderAPI, lab: LabInfo, roster: list[Person], deadlines: Deadlines, exact: bool
    ) -> None:
        self.course, self.lab, self.roster, self.deadlines = course, lab, roster, deadlines
        self.root = Path(course.coursedir.root)
        self.by_id = {person.id: person for person in roster}
        # In the exchange an id is an account: ADA must not submit for ada. In a folder, a person typed the
        # id.
        self.by_folded = {} if exact else _unique((fold_name(person.id), person) for person in roster)
        self.by_name = _unique((name, person) for person in roster for name in person.names)

    def is_student(self, name: str) -> bool:
        """Return True if ``name`` is an id of the roster."""
        return name in self.by_id or fold_name(name) in self.by_folded

    def keeps_out(self, student: str, submitted: datetime | None) -> bool:
        """Return True if a submission of ``student`` at ``submitted`` (UTC) is late and must not replace one
        that was on time.
        """
        late = self.deadlines.seconds_late(student, submitted) > 0
        return late and not self.deadlines.rule.replaces

    def take(self, arrivals: Iterable[Incoming]) -> Inventory:
        """Write the submissions and return the inventory."""
        claims: dict[str, list[Incoming]] = defaultdict(list)
        strangers = []
        for arrival in arrivals:
            person, reason = self._person(arrival)
            if person is None:
                strangers.append(self._stranger(arrival, reason))
            elif arrival.refused:
                strangers.append(
                    Item(
                        arrival.claimed,
                        ItemState.REFUSED,
                        notes=(f"{printable(arrival.source)}: {arrival.refused}",),
                    )
                )
            else:
                claims[person.id].append(arrival)
        items = [self._student(student, claims.get(student, [])) for student in sorted(self.by_id)]
        return Inventory(self.lab, (*items, *sorted(strangers, key=lambda item: (item.student, item.notes))))

    def _person(self, arrival: Incoming) -> tuple[Person | None, str]:
        if not arrival.full_name:
            known = self.by_id.get(arrival.claimed) or self.by_folded.get(fold_name(arrival.claimed))
            return known, tr("no student of the roster has this id")
        known = self.by_name.get(normalise_name(arrival.claimed))
        if known is not None:
            return known, ""
        if any(normalise_name(arrival.claimed) in person.names for person in self.roster):
            return None, tr(
                "several students have this name: unpack the zip, "
                "call the folder by the student's id, and use --from FOLDER"
            )
        return None, tr("no student of the roster has this name")

    def _stranger(self, arrival: Incoming, reason: str) -> Item:
        place = self.root / COLLECTED / self.lab.directory / "unknown" / _safe(arrival.source)
        try:
            files = arrival.files()
        except Refused as error:
            return Item(
                printable(arrival.claimed),
                ItemState.UNKNOWN,
                notes=(f"{printable(arrival.source)}: {reason}; {error}",),
            )
        shutil.rmtree(place, ignore_errors=True)  # written by an earlier collection
        self._write(files, place)
        kept = tr("kept in {folder}", folder=place.relative_to(self.root))
        notes = (f"{printable(arrival.source)}: {reason}; {kept}",)
        return Item(printable(arrival.claimed), ItemState.UNKNOWN, submitted=arrival.submitted, notes=notes)

    def _student(self, student: str, arrivals: list[Incoming]) -> Item:
        place = Path(
            self.course.coursedir.format_path(
                self.course.coursedir.submitted_directory, student, self.lab.directory
            )
        )
        if not arrivals:
            return self._look(student, place, ItemState.KEPT if place.is_dir() else ItemState.MISSING)
        try:
            if reason := id_fault(student):
                raise Refused(reason)
            if len(arrivals) > 1:
                both = ", ".join(printable(arrival.source) for arrival in arrivals)
                raise Refused(tr("several submissions of one student: {both}; leave only one", both=both))
            arrival, left_out = arrivals[0].without_links()
            files = arrival.files()
        except Refused as error:
            kept = self._look(student, place, ItemState.REFUSED)
            return replace(
                kept,
                notes=(
                    str(error),
                    *([tr("what was received before is kept")] if place.is_dir() else []),
                    *kept.notes,
                ),
            )
        if left_out:
            names = ", ".join(printable(name) for name in left_out[:5])
            note = tr("left out, because it is no regular file: {names}", names=names)
            arrival = replace(arrival, notes=(*arrival.notes, note))
        item = self._place(student, place, arrival, files)
        if arrival.later is not None:
            item = replace(item, notes=(*item.notes, self._keep_late(student, arrival.later)))
        doubtful = arrival.full_name and item.late  # the zip has local times of Moodle's server
        return (
            replace(item, notes=(*item.notes, tr("late by the zip's dates: Moodle's page has the true one")))
            if doubtful
            else item
        )

    def _keep_late(self, student: str, arrival: Incoming) -> str:
        """Keep a late submission that does not count; return the note for the inventory."""
        late = how_late(self.deadlines.seconds_late(student, arrival.submitted))
        submitted = arrival.submitted or datetime.min
        place = late_folder(self.root, self.lab, student, submitted)
        text = "a later submission of {time} UTC is {late} late and does not count: {kept}"
        kept = tr("it is kept in {folder}", folder=place.relative_to(self.root))
        try:
            files = arrival.without_links()[0].files()
        except Refused as error:
            kept = str(error)
        else:
            files[TIMESTAMP] = submitted.strftime(FORMAT).encode()
            if _content(place) != files:
                shutil.rmtree(place, ignore_errors=True)
                self._write(files, place)
        return tr(text, time=shown_time(submitted), late=late, kept=kept)

    def _place(self, student: str, place: Path, arrival: Incoming, files: Files) -> Item:
        before = stamp(place)
        counts = before is not None and not self.keeps_out(student, before)
        if counts and self.keeps_out(student, arrival.submitted) and place.is_dir():
            return self._look(
                student, place, ItemState.UNCHANGED, (*arrival.notes, self._keep_late(student, arrival))
            )
        self._note_earlier(student, arrival.submitted, before, arrival.replaces)
        files.pop(TIMESTAMP, None)  # the student's file may be invalid and stop nbgrader
        if arrival.submitted is not None:
            files[TIMESTAMP] = arrival.submitted.strftime(FORMAT).encode()
        state = ItemState.NEW
        if place.is_dir():
            if _content(place) == files:
                return self._look(student, place, ItemState.UNCHANGED, arrival.notes)
            older = before is not None and arrival.submitted is not None and arrival.submitted < before
            if older and (counts or self.keeps_out(student, arrival.submitted)):
                note = tr(
                    "{source} is older than what was received before, which stays",
                    source=printable(arrival.source),
                )
                return self._look(student, place, ItemState.KEPT, (*arrival.notes, note))
            state = ItemState.REPLACED
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".collect-") as folder:
            fresh = Path(folder) / "new"
            self._write(files, fresh)
            notes = arrival.notes
            if place.is_dir():
                aside = self._aside(student)
                os.replace(place, aside)
                notes = (*notes, tr("the earlier one is in {folder}", folder=aside.relative_to(self.root)))
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh, place)
        return self._look(student, place, state, notes)

    def _note_earlier(self, student: str, submitted: datetime | None, *others: datetime | None) -> None:
        """Write the time of the submission that this one replaces, for the receipt."""
        earlier = [time for time in others if time is not None and submitted is not None and time < submitted]
        known = replaced_at(self.root, self.lab, student)
        if earlier and (known is None or known < max(earlier)):
            place = _replaced(self.root, self.lab, student) / TIMESTAMP
            write_text(place, max(earlier).strftime(FORMAT))

    def _aside(self, student: str) -> Path:
        folder = _replaced(self.root, self.lab, student)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = (int(path.name) for path in folder.iterdir() if path.name.isdigit())
        return folder / f"{1 + max(numbers, default=0):03d}"

    def _write(self, files: Files, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def _look(self, student: str, place: Path, state: ItemState, notes: tuple[str, ...] = ()) -> Item:
        """Return the line of the inventory for the submission at ``place``."""
        if not place.is_dir():
            return Item(student, state, notes=notes)
        submitted = stamp(place)
        late = int(self.deadlines.seconds_late(student, submitted))
        item = Item(student, state, submitted=submitted, late=late, notes=notes)
        try:
            found, _ = find_submission(place / self.lab.notebook, self.lab.directory)
            content = read_regular(found, MAX_BYTES)
        except (Invalid, Refused) as error:
            present = [path.name for path in place.iterdir() if path.name not in EXCHANGE_FILES]
            names = ", ".join(sorted(map(printable, present))[:5])
            return replace(
                item, notes=(*notes, tr("{reason}; there are: {names}", reason=error, names=names))
            )
        return replace(
            item,
            notebook=printable(found.name),
            renamed=found.name != self.lab.notebook,
            sha256=digest(content),
            size=len(content),
        )


def replaced_at(course: Path, lab: LabInfo, student: str) -> datetime | None:
    """Return the time of the submission that the collected one replaces, in UTC; None if it is the first."""
    return stamp(_replaced(course, lab, student))


def _replaced(course: Path, lab: LabInfo, student: str) -> Path:
    return course / COLLECTED / lab.directory / "replaced" / student


def _content(folder: Path) -> Files | None:
    """Return the files of a folder; None if one is unreadable."""
    try:
        return {
            path.relative_to(folder).as_posix(): read_regular(path, MAX_BYTES)
            for path in folder.rglob("*")
            if not path.is_dir()
        }
    except Refused:
        return None


def _unique(pairs: Iterable[tuple[str, Person]]) -> Mapping[str, Person]:
    """Return the keys that belong to one person only."""
    found: dict[str, set[Person]] = defaultdict(set)
    for key, person in pairs:
        found[key].add(person)
    return {key: next(iter(persons)) for key, persons in found.items() if len(persons) == 1}


def _safe(source: str) -> str:
    """Return a folder's name for any source."""
    plain = re.sub(r"[^\w. ()-]", "_", source).strip(". ")[:80]
    return f"{plain or 'unnamed'}-{digest(source.encode('utf-8', 'surrogateescape'))[:6]}"
