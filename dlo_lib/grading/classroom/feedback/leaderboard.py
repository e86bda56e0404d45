"""The leaderboard of a class: what the judge measured, with intervals, in one HTML file.

A row is an entry of a lab that measures (09_the_race). Its scores come from the judge's report, one for each
seed, and all entries have the same seeds; nothing on the page is a claim of a student. Rows are in the order
of their means. A *group* begins with its best entry, and has the following entries that cannot be
distinguished from it: the 95 % interval of the paired differences contains 0. The order within a group means
nothing.

*References*, such as a baseline, are separate rows. They ran on the same seeds, and are in no group.

An entry whose run lacks its commit, seed, configuration or data hash is listed with the reason and without a
place. Names are off by default: an entry has a name that only the class secret connects to a student, and the
student's own feedback page says it. The page has no scripts and no external files.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from dlo_lib.base.files import write_text
from dlo_lib.base.intervals import MeanInterval, difference, mean_interval
from dlo_lib.base.markup import environment
from dlo_lib.base.provenance import Provenance
from dlo_lib.base.text import language, tr
from dlo_lib.grading.classroom.gradebook.export import REPORTS, grades_folder
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import require_release, submitted_students
from dlo_lib.grading.judge.client import read_secret
from dlo_lib.grading.judge.preprocessor import SECRET_FILE
from dlo_lib.grading.judge.report import Report
from dlo_lib.grading.judge.report_store import load, report_file
from dlo_lib.grading.lab.course import LabInfo

PAGE = "leaderboard.html"
_WIDTH = 240
"""Of the bar of an interval, in pixels."""


@dataclass(frozen=True)
class Entry:
    """What the judge measured of a student.

    Attributes:
        name: on the page.
        scores: one for each seed, from 0 to 1, more is better.
        flops: of one run, forward and backward; None if they were not measured.
        run: the record of the run, as the judge verified it.
        check: the name of the check that measured it.
    """

    name: str
    scores: tuple[float, ...]
    flops: float | None
    run: Provenance
    check: str = field(default="", compare=False)

    @property
    def interval(self) -> MeanInterval:
        """The mean of the scores and its 95 % interval."""
        return mean_interval(self.scores)


@dataclass(frozen=True)
class Leaderboard:
    """The entries of a class.

    Attributes:
        groups: the best first; within a group, no entry can be distinguished from the first.
        outside: the names of those without a place, and why.
        references: rows that are no entries, the best first.
    """

    groups: tuple[tuple[Entry, ...], ...]
    outside: tuple[tuple[str, str], ...] = ()
    references: tuple[Entry, ...] = ()


References = Callable[[LabInfo, str, str], Iterable[Entry]]
"""Returns the references of a lab, from the class secret and the name of the check that measured entries."""


def read_leaderboard(
    course: NbGraderAPI, lab: LabInfo, names: bool = False, references: References | None = None
) -> Leaderboard:
    """Return the leaderboard of the graded submissions of ``lab``.

    Args:
        names: show the ids of the students.
        references: called if an entry has a place.

    Raises:
        UserError: the lab was not released in this course.
    """
    require_release(course, lab)
    folder = grades_folder(course, lab) / REPORTS
    entries, outside = list[Entry](), list[tuple[str, str]]()
    for student in submitted_students(course, lab):
        name = student if names else entry_name(Path(course.coursedir.root), lab, student)
        stored = load(report_file(folder, student))
        if stored is None:
            outside.append((name, tr("it is not graded")))
        elif (entry := read_entry(name, stored.report)) is None:
            outside.append((name, tr("the judge measured nothing: the feedback page says why")))
        else:
            entries.append(entry)
    board = ranked(entries, outside)
    if references is None or not board.groups:
        return board
    secret = read_secret(Path(course.coursedir.root))
    return with_references(board, references(lab, secret, board.groups[0][0].check))


def read_entry(name: str, report: Report) -> Entry | None:
    """Return what a report measured; None if no check of it did."""
    for question in report.questions.values():
        for check in question.checks:
            measured = check.measured
            scores = tuple(float(score) for score in measured.get("scores", ()))
            if scores and all(map(math.isfinite, scores)):
                run = Provenance.read(measured.get("run"))
                return Entry(name, scores, measured.get("flops"), run, check.name)
    return None


def ranked(entries: Iterable[Entry], outside: Iterable[tuple[str, str]] = ()) -> Leaderboard:
    """Return the leaderboard of ``entries``; those without a whole record are outside, with the reason."""
    every, without = list(entries), list(outside)
    seeds = max((len(entry.scores) for entry in every), default=0)
    taking_part = []
    for entry in every:
        if missing := entry.run.missing:
            without.append((entry.name, tr("the run has no {missing}", missing=", ".join(missing))))
        elif len(entry.scores) != seeds:
            text = "it has {number} scores, others have {seeds}: grade the lab again"
            without.append((entry.name, tr(text, number=len(entry.scores), seeds=seeds)))
        else:
            taking_part.append(entry)
    taking_part.sort(key=lambda entry: (-entry.interval.mean, entry.name))
    groups: list[list[Entry]] = []
    for entry in taking_part:
        if groups and not distinguishable(groups[-1][0], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return Leaderboard(tuple(map(tuple, groups)), tuple(sorted(without)))


def with_references(board: Leaderboard, references: Iterable[Entry]) -> Leaderboard:
    """Return ``board`` with the rows of ``references``. Those of other data or seeds than the best entry are
    outside, because their differences to an entry would mean nothing."""
    best, kept, outside = board.groups[0][0], list[Entry](), list(board.outside)
    for row in references:
        if row.run.data == best.run.data and len(row.scores) == len(best.scores):
            kept.append(row)
        else:
            outside.append((row.name, tr("it ran on other data than the entries: grade the lab again")))
    kept.sort(key=lambda row: (-row.interval.mean, row.name))
    return replace(board, references=tuple(kept), outside=tuple(sorted(outside)))


def distinguishable(one: Entry, other: Entry) -> bool:
    """Whether the 95 % interval of the differences, seed by seed, leaves out 0."""
    return not difference(one.scores, other.scores).contains_zero


def entry_name(root: Path, lab: LabInfo, student: str) -> str:
    """Return the name of a student's entry, which only the secret of the course in ``root`` connects to the
    student."""
    secret = (root / SECRET_FILE).read_bytes()
    text = f"leaderboard/{lab.directory}/{student}".encode("utf-8", "surrogateescape")
    return tr("entry {digits}", digits=hmac.new(secret, text, hashlib.sha256).hexdigest()[:6])


def leaderboard_html(lab: LabInfo, board: Leaderboard) -> str:
    """Return the page as HTML."""
    every = [entry for group in board.groups for entry in group]
    shown = [*every, *board.references]
    finite = [
        end for entry in shown for end in (entry.interval.low, entry.interval.high) if math.isfinite(end)
    ]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)

    def place(value: float) -> float:
        """Return a score as a position on the bar, in pixels."""
        share = (value - low) / (high - low) if high > low else 0.5
        return _WIDTH * min(max(share, 0.0), 1.0)

    return (
        environment("dlo_lib.grading.classroom.feedback")
        .get_template("leaderboard.html.j2")
        .render(
            lab=lab,
            board=board,
            place=place,
            width=_WIDTH,
            seeds=len(every[0].scores) if every else 0,
            pairs=len(every) * (len(every) - 1) // 2,
            language=language(),
        )
    )


def write_leaderboard(course: NbGraderAPI, lab: LabInfo, board: Leaderboard, out: Path | None = None) -> Path:
    """Write the page to ``out`` and return its path; None for ``grades/<lab>/leaderboard.html``."""
    file = out or grades_folder(course, lab) / PAGE
    write_text(file, leaderboard_html(lab, board))
    return file
