"""Collecting a lab: an inventory of what came and what did not, a receipt for each submission, and nothing lost.

Each arrival is matched with the roster: by id, or by the full name that Moodle gives. The newest of a student counts, as in nbgrader. It is
written to ``submitted/<student>/<lab>/`` whole or not at all; what was there before moves to ``collected/<lab>/``, where what belongs to
nobody of the roster goes too. `grades/<lab>/inventory.csv` and `receipts.csv` say the same each time they are written.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from dlo_lib.errors import UserError, no_space
from dlo_lib.files import write_text
from dlo_lib.grading.archive import Refused, opened, read_regular, same_name, shown
from dlo_lib.grading.arrivals import EXCHANGE_FILES, Arrival, Files, from_entries, from_exchange, utc_time
from dlo_lib.grading.batch import released
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.export import grades_folder
from dlo_lib.grading.handed_in import TIMESTAMP
from dlo_lib.grading.intake import MAX_BYTES, Invalid, find_submission
from dlo_lib.grading.inventory import Inventory, Item, State
from dlo_lib.grading.receipt import digest
from dlo_lib.grading.roster import Person, letters, read_roster, unfit
from dlo_lib.text import tr

COLLECTED = "collected"
INVENTORY, RECEIPTS = "inventory.csv", "receipts.csv"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S.%f UTC"


def collect(course: NbGraderAPI, lab: LabInfo, source: Path | None = None) -> Inventory:
    """Collect ``lab`` from nbgrader's exchange, or from the folder or zip ``source``, into the course; the inventory is written too.

    Raises:
        UserError: the lab was never released in this course, nobody is in its roster, the source cannot be read, or it is an archive that
            must not be unpacked; then nothing has changed.
    """
    released(course, lab)
    roster = read_roster(course)
    if not roster:
        raise UserError(tr("nobody is in the roster of {folder}: `dlo roster import` comes first", folder=course.coursedir.root))
    with course.gradebook as gradebook:
        due = gradebook.find_assignment(lab.directory).duedate
    collector = _Collector(course, lab, roster, due, exact=source is None)
    if source is None:
        early_only = course.exchange.Collect(coursedir=course.coursedir, authenticator=course.authenticator, parent=course).before_duedate
        inventory = collector.take(_newest(from_exchange(course, lab), due if early_only else None))
    else:
        with opened(source) as entries:
            inventory = collector.take(from_entries(entries, lab, collector.is_student))
    folder = grades_folder(course, lab)
    write_text(folder / INVENTORY, inventory.csv())
    write_text(folder / RECEIPTS, inventory.receipts())
    return inventory


def _newest(arrivals: Iterable[Arrival], due: datetime | None) -> list[Arrival]:
    """Of each student the last one (before ``due``, if any is); refused ones stay, to be named."""
    taken: dict[str, Arrival] = {}
    refused = []
    for arrival in sorted(arrivals, key=lambda arrival: (arrival.submitted or datetime.min, arrival.source)):
        if arrival.refused:
            refused.append(arrival)
        elif due is None or arrival.claimed not in taken or (arrival.submitted or datetime.min) <= due:
            taken[arrival.claimed] = arrival
    return [*taken.values(), *refused]


class _Collector:
    """Puts arrivals in their places."""

    def __init__(self, course: NbGraderAPI, lab: LabInfo, roster: list[Person], due: datetime | None, exact: bool) -> None:
        self.course, self.lab, self.roster, self.due = course, lab, roster, due
        self.root = Path(course.coursedir.root)
        self.by_id = {person.id: person for person in roster}
        # In the exchange an id is an account: ADA is not ada, and must not hand in for her. In a folder somebody typed it.
        self.by_folded = {} if exact else _unique((same_name(person.id), person) for person in roster)
        self.by_name = _unique((name, person) for person in roster for name in person.names)

    def is_student(self, name: str) -> bool:
        """Whether ``name`` is an id of the roster."""
        return name in self.by_id or same_name(name) in self.by_folded

    def take(self, arrivals: Iterable[Arrival]) -> Inventory:
        """Write what arrived, and say what became of each."""
        claims: dict[str, list[Arrival]] = defaultdict(list)
        strangers = []
        for arrival in arrivals:
            person, reason = self._person(arrival)
            if person is None:
                strangers.append(self._stranger(arrival, reason))
            elif arrival.refused:
                strangers.append(Item(arrival.claimed, State.REFUSED, notes=(f"{shown(arrival.source)}: {arrival.refused}",)))
            else:
                claims[person.id].append(arrival)
        items = [self._student(student, claims.get(student, [])) for student in sorted(self.by_id)]
        return Inventory(self.lab, (*items, *sorted(strangers, key=lambda item: (item.student, item.notes))))

    def _person(self, arrival: Arrival) -> tuple[Person | None, str]:
        if not arrival.full_name:
            known = self.by_id.get(arrival.claimed) or self.by_folded.get(same_name(arrival.claimed))
            return known, tr("no student of the roster has this id")
        known = self.by_name.get(letters(arrival.claimed))
        if known is not None:
            return known, ""
        if any(letters(arrival.claimed) in person.names for person in self.roster):
            return None, tr("several students have this name: unpack the zip, call the folder by the student's id, and use --from FOLDER")
        return None, tr("no student of the roster has this name")

    def _stranger(self, arrival: Arrival, reason: str) -> Item:
        place = self.root / COLLECTED / self.lab.directory / "unknown" / _safe(arrival.source)
        try:
            files = arrival.files()
        except Refused as error:
            return Item(shown(arrival.claimed), State.UNKNOWN, notes=(f"{shown(arrival.source)}: {reason}; {error}",))
        shutil.rmtree(place, ignore_errors=True)  # the same arrival, of an earlier collection
        self._write(files, place)
        notes = (f"{shown(arrival.source)}: {reason}; {tr('kept in {folder}', folder=place.relative_to(self.root))}",)
        return Item(shown(arrival.claimed), State.UNKNOWN, submitted=arrival.submitted, notes=notes)

    def _student(self, student: str, arrivals: list[Arrival]) -> Item:
        place = Path(self.course.coursedir.format_path(self.course.coursedir.submitted_directory, student, self.lab.directory))
        if not arrivals:
            return self._look(student, place, State.KEPT if place.is_dir() else State.MISSING)
        try:
            if reason := unfit(student):
                raise Refused(reason)
            if len(arrivals) > 1:
                both = ", ".join(shown(arrival.source) for arrival in arrivals)
                raise Refused(tr("several submissions of one student: {both}; leave only one", both=both))
            files = arrivals[0].files()
        except Refused as error:
            kept = self._look(student, place, State.REFUSED)
            return replace(kept, notes=(str(error), *([tr("what was received before is kept")] if place.is_dir() else []), *kept.notes))
        item = self._place(student, place, arrivals[0], files)
        doubtful = arrivals[0].full_name and item.late  # Moodle's zip has the times of its own store, in the zone of its server
        return replace(item, notes=(*item.notes, tr("late by the zip's dates: Moodle's page has the true one"))) if doubtful else item

    def _place(self, student: str, place: Path, arrival: Arrival, files: Files) -> Item:
        files.pop(TIMESTAMP, None)  # the student's own may be anything; nbgrader would stop at it
        if arrival.submitted is not None:
            files[TIMESTAMP] = arrival.submitted.strftime(TIME_FORMAT).encode()
        state = State.NEW
        if place.is_dir():
            before = _stamp(place)
            if _content(place) == files:
                return self._look(student, place, State.UNCHANGED, arrival.notes)
            if before is not None and arrival.submitted is not None and arrival.submitted < before:
                note = tr("{source} is older than what was received before, which stays", source=shown(arrival.source))
                return self._look(student, place, State.KEPT, (*arrival.notes, note))
            state = State.REPLACED
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

    def _aside(self, student: str) -> Path:
        folder = self.root / COLLECTED / self.lab.directory / "replaced" / student
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{1 + max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0):03d}"

    def _write(self, files: Files, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        except OSError as error:
            if full := no_space(self.root, error):
                raise full from error
            raise

    def _look(self, student: str, place: Path, state: State, notes: tuple[str, ...] = ()) -> Item:
        """The line for what lies at ``place``."""
        if not place.is_dir():
            return Item(student, state, notes=notes)
        submitted = _stamp(place)
        late = max(0, int((submitted - self.due).total_seconds())) if submitted is not None and self.due is not None else 0
        item = Item(student, state, submitted=submitted, late=late, notes=notes)
        try:
            found, _ = find_submission(place / self.lab.notebook, self.lab.directory)
            content = read_regular(found, MAX_BYTES)
        except (Invalid, Refused) as error:
            names = ", ".join(sorted(shown(path.name) for path in place.iterdir() if path.name not in EXCHANGE_FILES)[:5])
            return replace(item, notes=(*notes, tr("{reason}; there are: {names}", reason=error, names=names)))
        return replace(item, notebook=shown(found.name), renamed=found.name != self.lab.notebook, sha256=digest(content), size=len(content))


def _content(folder: Path) -> Files | None:
    """The files of a folder; None when there is one that cannot be read."""
    try:
        return {path.relative_to(folder).as_posix(): read_regular(path, MAX_BYTES) for path in folder.rglob("*") if not path.is_dir()}
    except Refused:
        return None


def _stamp(folder: Path) -> datetime | None:
    try:
        return utc_time(read_regular(folder / TIMESTAMP, 200).decode())
    except (Refused, ValueError):
        return None


def _unique(pairs: Iterable[tuple[str, Person]]) -> Mapping[str, Person]:
    """Those keys that lead to one person only."""
    found: dict[str, set[Person]] = defaultdict(set)
    for key, person in pairs:
        found[key].add(person)
    return {key: next(iter(persons)) for key, persons in found.items() if len(persons) == 1}


def _safe(source: str) -> str:
    """A folder's name for an arrival of any name."""
    plain = re.sub(r"[^\w. ()-]", "_", source).strip(". ")[:80]
    return f"{plain or 'unnamed'}-{digest(source.encode('utf-8', 'surrogateescape'))[:6]}"
