"""What changed checks change: the points of each check before and after a regrade, before they are released.

A regrade keeps the points by check of the last grading whose feedback was released, or of the first one, and
lists each difference in ``changes.csv``. Releasing the feedback ends the comparison.

A grading that ends early, killed or with an error, leaves rows of both versions of the checks and no list. A
file marks it until a grading of the lab comes to its end, and no feedback is released before that. The file
has the totals before the first of these gradings, so the notes of the last one compare all rows with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.roster.tables import csv_text
from dlo_lib.grading.judge.report import CheckReport, Report
from dlo_lib.grading.judge.report_store import load, report_file

KEPT = "before_regrade.json"
CHANGES = "changes.csv"
UNFINISHED = "unfinished"
HEADER = ["student", "question", "check", "title", "points_before", "points_now", "status", "message"]
MOST_NAMES = 10  # students named in a note

Totals = dict[str, tuple[float, str]]  # student → total, and the version of the checks that gave it
Value = TypeVar("Value")


@dataclass(frozen=True)
class CheckChange:
    """A check of one student that gives other points than before.

    Attributes:
        title, status, message: of the check now; of a check that no longer exists, empty.
    """

    student: str
    question: str
    check: str
    title: str
    before: float
    now: float
    status: str
    message: str


def keep_points(folder: Path, reports: Path, versions: Mapping[str, str]) -> None:
    """Keep the points by check of students who are graded, unless earlier ones are kept.

    Args:
        folder: ``grades/<lab>/`` of the course.
        reports: its folder with the judge's reports.
        versions: the version of the checks that judged each student; "" if it is not known.
    """
    kept = _kept(folder)
    for student, version in versions.items():
        stored = load(report_file(reports, student))
        if student not in kept and version and stored is not None:
            points = {check: report.points for check, report in _checks(stored.report).items()}
            kept[student] = {"checks": version, "points": [[*check, each] for check, each in points.items()]}
    write_text(folder / KEPT, json.dumps(kept, indent=1))


def changes_of(folder: Path, reports: Path, versions: Mapping[str, str]) -> list[CheckChange]:
    """Return the checks that give students other points than those kept, if other checks judged them since.

    Args:
        versions: as for :func:`keep_points`, now.
    """
    found = []
    for student, earlier in sorted(_kept(folder).items()):
        stored = load(report_file(reports, student))
        if stored is None or versions.get(student, "") in ("", earlier["checks"]):
            continue
        before = {(question, check): points for question, check, points in earlier["points"]}
        now = _checks(stored.report)
        for question, name in dict.fromkeys([*now, *before]):
            check = now.get((question, name))
            points, was = check.points if check else 0.0, before.get((question, name), 0.0)
            if points != was:
                title, status, message = (check.title, check.status, check.message) if check else ("", "", "")
                found.append(CheckChange(student, question, name, title, was, points, status, message))
    return found


def write_changes(folder: Path, changes: Iterable[CheckChange]) -> list[str]:
    """Write ``changes.csv``, and return a note on each check by which students lose points. Without a change
    there is no file.
    """
    listed = list(changes)
    if not listed:
        (folder / CHANGES).unlink(missing_ok=True)
        return []
    rows = [
        [each.student, each.question, each.check, each.title, f"{each.before:g}", f"{each.now:g}",
         each.status, each.message]
        for each in listed
    ]  # fmt: skip
    write_text(folder / CHANGES, csv_text(HEADER, rows))
    losses: dict[tuple[str, str, str], list[CheckChange]] = {}
    for each in listed:
        if each.now < each.before:
            losses.setdefault((each.question, each.check, each.title), []).append(each)
    notes = []
    for (question, check, title), lost in losses.items():
        names = ", ".join(each.student for each in lost[:MOST_NAMES])
        more = tr(" and {number} more", number=len(lost) - MOST_NAMES) if len(lost) > MOST_NAMES else ""
        text = "{question}, {check} ({title}): {number} lose {points:g} points by it: {names}{more}"
        points = sum(each.before - each.now for each in lost)
        values = {"question": question, "check": check, "title": title, "number": len(lost)}
        notes.append(tr(text, **values, points=points, names=names, more=more))
    return [*notes, pending_note(folder)]


def pending_note(folder: Path) -> str:
    """Return a note on changes that are not released yet; "" if there are none."""
    file = folder / CHANGES
    if not file.is_file():
        return ""
    text = (
        "checks have changed since the last feedback: {file} lists each student and check with other points"
    )
    return tr(text, file=file)


def begin_grading(folder: Path, before: Totals) -> Totals:
    """Record that a grading of the lab has begun to write rows.

    Args:
        before: the results that it finds.

    Returns:
        ``before``, or for a student of a grading that has not come to its end, what that one found.
    """
    found = before | _by_student(folder / UNFINISHED, lambda of: (float(of[0]), str(of[1])))
    write_text(folder / UNFINISHED, json.dumps(found))
    return found


def end_grading(folder: Path) -> None:
    """Record that its rows, results and changes are written."""
    (folder / UNFINISHED).unlink(missing_ok=True)


def unfinished_note(folder: Path) -> str:
    """Return a note on a grading that has not come to its end; "" if there is none."""
    if not (folder / UNFINISHED).is_file():
        return ""
    return tr(
        "a grading of {lab} has not come to its end: some rows are earlier ones, and no list says what "
        "changed checks take; `dlo grade {lab} --resume` completes it",
        lab=folder.name,
    )


def require_finished(folder: Path) -> None:
    """Check that the last grading of the lab has come to its end.

    Raises:
        UserError: it was interrupted, or it is running.
    """
    if note := unfinished_note(folder):
        raise UserError(note)


def end_comparison(folder: Path) -> None:
    """Forget the earlier points, because the feedback on the present ones is released."""
    for name in (KEPT, CHANGES):
        (folder / name).unlink(missing_ok=True)


def _checks(report: Report) -> dict[tuple[str, str], CheckReport]:
    return {
        (name, check.name): check for name, question in report.questions.items() for check in question.checks
    }


def _kept(folder: Path) -> dict[str, Any]:
    """Return what :func:`keep_points` wrote; nothing if there is no readable file."""
    return _by_student(folder / KEPT, lambda of: {"checks": of["checks"], "points": of["points"]})


def _by_student(file: Path, value: Callable[[Any], Value]) -> dict[str, Value]:
    """Return the ``value`` of each student's entry in a JSON file; nothing if there is no readable file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {str(student): value(of) for student, of in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
