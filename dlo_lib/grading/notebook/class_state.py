"""What a class knows of a student's labs: released, due, submitted, graded, feedback to fetch.

It is read from the exchange and from nbgrader's cache of the student's submissions, without nbgrader, which
would cost a kernel 35 MB. The instructor's commands write the due dates to the exchange; a page there is
named by a digest of the secret of a submission, which only the student and the instructor have. Extensions
are not in the exchange, because classmates could read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from jupyter_core.paths import jupyter_config_path, jupyter_data_dir
from traitlets.config import Config
from traitlets.config.loader import JSONFileConfigLoader, PyFileConfigLoader

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.exchange import has_class
from dlo_lib.grading.lab.times import DEADLINES_FILE, how_late, utc_time

DEFAULT_ROOT = "/usr/local/share/nbgrader/exchange"  # nbgrader's
GRADE = re.compile(r'<meta name="dlo-grade" content="([-\d.]+) ([-\d.]+)">')
MOST_BYTES = 8 << 20  # of a page


@dataclass(frozen=True)
class ClassState:
    """One lab in a class; times are UTC with their zone.

    Attributes:
        due: the due date of the class; None if there is none.
        grace_ends: work is late after this time; None without a due date.
        zone: the zone in which the class reads times.
        rule: what late work loses, in words; "" for nothing.
        replaces: late work replaces work that was on time.
        submitted: the time of the last submission; None if the student submitted nothing.
        on_time: the time of an earlier submission that counts instead of the last one, which is late.
        grade: points after a penalty, and points of the lab; None before the feedback.
        feedback: whether a feedback page of the submission exists.
        fetched: the student's copy of that page; None if it must be fetched.
    """

    due: datetime | None = None
    grace_ends: datetime | None = None
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    rule: str = ""
    replaces: bool = False
    submitted: datetime | None = None
    on_time: datetime | None = None
    grade: tuple[float, float] | None = None
    feedback: bool = False
    fetched: Path | None = None

    def seconds_late(self, moment: datetime | None = None) -> float:
        """Return the seconds from the due date to ``moment`` (default: now), 0 until the end of the grace."""
        moment = moment or datetime.now(UTC)
        if self.due is None or moment <= (self.grace_ends or self.due):
            return 0.0
        return (moment - self.due).total_seconds()

    @property
    def is_late(self) -> bool:
        """Whether the submission that counts is late, or nothing is submitted after the due date."""
        return self.grade is None and self.seconds_late(self.on_time or self.submitted) > 0

    def local(self, moment: datetime) -> str:
        """Return a time in the zone of the class, such as ``Mon 30 Nov 18:00 CET``."""
        return f"{moment.astimezone(self.zone):%a %d %b %H:%M %Z}"

    def said(self, now: datetime | None = None) -> str:
        """Return the state in a few words."""
        now = now or datetime.now(UTC)
        if self.grade is not None:
            text = tr("graded: {points:g} of {maximum:g} points", points=self.grade[0], maximum=self.grade[1])
            return text if self.fetched else tr("{state}; feedback to fetch", state=text)
        if self.submitted is not None:
            text = tr("submitted {time}", time=self.local(self.on_time or self.submitted))
            if late := self.seconds_late(self.on_time or self.submitted):
                text = tr("{state}, {late} late", state=text, late=how_late(late))
            return text
        if self.due is None:
            return tr("released")
        if now <= self.due:
            left = how_late((self.due - now).total_seconds())
            return tr("due {time} (in {left})", time=self.local(self.due), left=left)
        ago = how_late((now - self.due).total_seconds())
        return tr("due {time}, {late} ago", time=self.local(self.due), late=ago)


class StudentsClass:
    """The exchange of the student's class, as nbgrader's configuration names it.

    Args:
        labs_folder: the folder of the student's labs, with fetched feedback.
    """

    def __init__(self, labs_folder: Path) -> None:
        self._folder = labs_folder
        config = _configuration() if has_class() else Config()
        exchange, course = config.get("Exchange", {}), config.get("CourseDirectory", {})
        self._root = Path(str(exchange.get("root", DEFAULT_ROOT)))
        self._cache = Path(str(exchange.get("cache") or Path(jupyter_data_dir()) / "nbgrader_cache"))
        self._zone = str(exchange.get("timezone", "UTC"))
        name = str(course.get("course_id", ""))
        chosen = [name] if name else os.environ.get("DLO_HUB_COURSES", "").split()
        self._courses = (chosen or _names(self._root)) if has_class() else []

    def of(self, lab: LabInfo) -> ClassState | None:
        """Return the state of ``lab``; None if no course of the student has released it."""
        for course in self._courses:
            place = self._root / course
            try:
                released = (place / "outbound" / lab.directory).is_dir()
            except OSError:  # a course of others
                released = False
            if released:
                return self._graded(self._submitted(_dates(place, lab), course, lab), course, lab)
        return None

    def _submitted(self, state: ClassState, course: str, lab: LabInfo) -> ClassState:
        times = [time for time, _ in self._submissions(course, lab)]
        if not times:
            return state
        last = max(times)
        early = [time for time in times if not state.seconds_late(time)]
        counts_early = bool(early) and state.seconds_late(last) > 0 and not state.replaces
        return replace(state, submitted=last, on_time=max(early) if counts_early else None)

    def _graded(self, state: ClassState, course: str, lab: LabInfo) -> ClassState:
        """Add the newest feedback page of a submission of the student."""
        for _, folder in sorted(self._submissions(course, lab), reverse=True):
            secret = _text(folder / "submission_secret.txt", 1_000)
            if not secret:
                continue
            digest = hashlib.md5(f"{secret}{lab.name}".encode(), usedforsecurity=False).hexdigest()
            text = _text(self._root / course / "feedback" / f"{digest}.html", MOST_BYTES)
            found = GRADE.search(text[:4_000])
            if found is None:  # no page, or a receipt
                continue
            stamp = folder.name.split("+", 2)[2]
            own = self._folder / lab.directory / "feedback" / stamp / f"{lab.name}.html"
            fetched = own if _text(own, MOST_BYTES) == text else None
            return replace(state, grade=(float(found[1]), float(found[2])), feedback=True, fetched=fetched)
        return state

    def _submissions(self, course: str, lab: LabInfo) -> list[tuple[datetime, Path]]:
        found = []
        for folder in _entries(self._cache / course):
            parts = folder.name.split("+", 2)
            if len(parts) == 3 and parts[1] == lab.directory:
                try:
                    time = utc_time(parts[2], self._zone).replace(tzinfo=UTC)
                except ValueError:  # a folder that nbgrader did not write
                    continue
                found.append((time, folder))
        return found


def class_states(labs: Iterable[LabInfo], labs_folder: Path) -> dict[str, ClassState]:
    """Return the state of each of ``labs`` that the student's class has released, by directory.

    Raises:
        UserError: nbgrader's configuration ends with an error.
    """
    class_ = StudentsClass(labs_folder)
    found = {lab.directory: class_.of(lab) for lab in labs}
    return {name: state for name, state in found.items() if state is not None}


def _dates(place: Path, lab: LabInfo) -> ClassState:
    """Return the dates that the instructor published in ``place``; none if the file is not one of theirs."""
    try:
        published = json.loads(_text(place / DEADLINES_FILE, 1 << 20) or "{}")
        dates, zone = published["labs"][lab.directory], ZoneInfo(published["timezone"])
        due, grace = (
            datetime.fromisoformat(dates[key]) if dates.get(key) else None for key in ("due", "grace_ends")
        )
        return ClassState(due, grace, zone, str(dates.get("late", "")), bool(dates.get("replaces")))
    except (ValueError, TypeError, OSError, LookupError, AttributeError):
        return ClassState()


def _configuration() -> Config:
    """Return nbgrader's configuration of the user and the site, the nearest file last.

    Raises:
        UserError: a file of it ends with an error.
    """
    config = Config()
    for place in reversed(jupyter_config_path()):
        config.merge(_loaded(Path(place)))
    own = state_dir() / "jupyter"  # of `dlo lab`; a server that was started in another way has no path to it
    if "root" not in config.get("Exchange", {}):
        config.merge(_loaded(own))
    return config


def _loaded(folder: Path) -> Config:
    config = Config()
    for name, loader in (
        ("nbgrader_config.py", PyFileConfigLoader),
        ("nbgrader_config.json", JSONFileConfigLoader),
    ):
        if (folder / name).is_file():
            try:
                config.merge(loader(name, path=str(folder)).load_config())
            except Exception as error:  # the file is a program of another person
                text = "the class is not shown, because {file} cannot be read ({reason}): correct it"
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise UserError(tr(text, file=folder / name, reason=reason)) from error
    return config


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:  # absent or closed
        return


def _text(file: Path, most: int) -> str:
    """Return the text of a file of another program; "" if it is absent, closed or too large."""
    try:
        if file.stat().st_size > most:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
