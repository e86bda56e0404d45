"""Due dates, lateness and penalties of submissions, by the course file, in nbgrader's gradebook.

:func:`settle` applies the course file to a lab: the due date, the extension and the penalty of each
submission in the gradebook. It judges nothing, so that a moved deadline or another rule counts at the next
``dlo grade``, ``dlo feedback``, ``dlo export`` or ``dlo deadlines``. nbgrader's autograde and formgrader do
the same for one submission, by :class:`CoursePenalties`. A due date that the course file lacks is the one of
formgrader, and without a rule for late work, the plug-in of ``nbgrader_config.py`` decides.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbgrader.api import Gradebook, MissingEntry, SubmittedAssignment
from nbgrader.apps.api import NbGraderAPI
from nbgrader.plugins import LateSubmissionPlugin
from nbgrader.preprocessors import AssignLatePenalties
from sqlalchemy.exc import OperationalError

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.gradebook_file import is_locked, locked_gradebook, patient_url
from dlo_lib.grading.classroom.roster.course_file import CourseFile, Duration, LateRule, read_course_file
from dlo_lib.grading.classroom.roster.roster import unknown_student
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.times import DEADLINES_FILE, how_late


@dataclass(frozen=True)
class Deadlines:
    """When the submissions of one lab are due.

    Attributes:
        file: the course file.
        lab: the directory of the lab.
        due: the due date of the class, in UTC with its zone; None if there is none.
    """

    file: CourseFile
    lab: str
    due: datetime | None

    @property
    def rule(self) -> LateRule:
        """The rule for late work."""
        return self.file.rule(self.lab)

    @property
    def last(self) -> datetime | None:
        """The last due date of all students."""
        ends = [self.of(student) for student in self.file.of(self.lab).extensions]
        return max((end for end in (self.due, *ends) if end is not None), default=None)

    def of(self, student: str) -> datetime | None:
        """Return the due date of ``student``, with the extension, in UTC with its zone."""
        end = self.file.of(self.lab).extensions.get(student)
        if self.due is None or end is None:
            return self.due
        return end.after(self.due, self.file.zone) if isinstance(end, Duration) else max(end, self.due)

    def seconds_late(self, student: str, submitted: datetime | None) -> float:
        """Return the seconds after the due date, 0 within the grace; ``submitted`` is UTC without a zone."""
        due = self.of(student)
        if submitted is None or due is None:
            return 0.0
        moment = submitted.replace(tzinfo=UTC)
        return (moment - due).total_seconds() if moment > self.rule.grace.after(due, self.file.zone) else 0.0

    def days_late(self, student: str, submitted: datetime | None) -> int:
        """Return the days of the calendar that have begun after the due date, 0 within the grace."""
        due, seconds = self.of(student), self.seconds_late(student, submitted)
        if not seconds or due is None or submitted is None:
            return 0
        days = max(1, math.ceil(seconds / 86_400))
        # A day at which the clocks change has 23 or 25 hours.
        for number in (days - 1, days):
            if number and submitted.replace(tzinfo=UTC) <= Duration(number).after(due, self.file.zone):
                return number
        return days + 1

    def penalty(self, student: str, submitted: datetime | None, score: float, maximum: float) -> float:
        """Return the points, at most ``score``, that a submission with ``score`` of ``maximum`` points
        loses.
        """
        due, rule = self.of(student), self.rule
        days = self.days_late(student, submitted)
        if not days or due is None or submitted is None:
            return 0.0
        closed = rule.closed_after.after(due, self.file.zone) if rule.closed_after is not None else None
        if closed is not None and submitted.replace(tzinfo=UTC) > closed:
            return score
        return min(score, rule.at_most.of(maximum), days * rule.per_day.of(maximum))


def read_deadlines(course: NbGraderAPI, lab: LabInfo) -> Deadlines:
    """Return the deadlines of ``lab``, from the course file and, if that has no due date, the gradebook.

    Raises:
        UserError: the course file is wrong, an extension is that of an unknown student or of a lab without a
            due date, or both the course file and a plug-in set penalties.
    """
    file = read_course_file(course.coursedir.root)
    with course.gradebook as gradebook:
        found = _deadlines(gradebook, lab.directory, file)
        roster = [student.id for student in gradebook.students]
    extensions = file.of(lab.directory).extensions
    for student in extensions:
        if roster and student not in roster:
            raise UserError(f"{file.path}: {unknown_student(student, roster)}")
    if extensions and found.due is None:
        text = "{file}: {lab} has extensions and no due date: add due = 2026-11-30T18:00:00"
        raise UserError(tr(text, file=file.path, lab=lab.directory))
    _check_plugin(AssignLatePenalties(parent=course), found)
    return found


def settle(course: NbGraderAPI, lab: LabInfo) -> Deadlines:
    """Enter due date, extensions and penalties of ``lab`` into the gradebook; return the deadlines.

    Raises:
        UserError: as :func:`read_deadlines`, or another program holds the gradebook.
    """
    found = read_deadlines(course, lab)
    step = AssignLatePenalties(parent=course)
    try:
        with Gradebook(patient_url(course.coursedir.db_url), course.coursedir.course_id) as gradebook:
            _settle(gradebook, lab, found, step)
    except OperationalError as error:
        if is_locked(error):
            raise locked_gradebook(Path(course.coursedir.root)) from error
        raise
    return found


def _settle(gradebook: Gradebook, lab: LabInfo, found: Deadlines, step: AssignLatePenalties) -> None:
    try:
        assignment = gradebook.find_assignment(lab.directory)
    except MissingEntry:
        return
    if found.due is not None:
        assignment.duedate = found.due.replace(tzinfo=None)
    for submission in gradebook.assignment_submissions(lab.directory):
        settle_submission(submission, found, step, gradebook)
    gradebook.db.commit()


def publish_deadlines(course: NbGraderAPI) -> str:
    """Write the due dates of all labs of the gradebook to the exchange, where students can read them; return
    a note if the exchange cannot be written, otherwise "".

    The file has no extension, because classmates would read it too.

    Raises:
        UserError: the course file is wrong.
    """
    file = read_course_file(course.coursedir.root)
    labs = {}
    with course.gradebook as gradebook:
        for assignment in gradebook.assignments:
            found = _deadlines(gradebook, assignment.name, file)
            labs[assignment.name] = {
                "due": None if found.due is None else found.due.isoformat(),
                "grace_ends": None
                if found.due is None
                else found.rule.grace.after(found.due, file.zone).isoformat(),
                "late": rule_text(found.rule),
                "replaces": found.rule.replaces,
            }
    text = json.dumps({"timezone": file.zone.key, "labs": labs}, indent=1, sort_keys=True) + "\n"
    settings = course.exchange.ReleaseAssignment(
        coursedir=course.coursedir, authenticator=course.authenticator, parent=course
    )
    place = Path(settings.root) / course.coursedir.course_id / DEADLINES_FILE
    if not place.parent.is_dir():  # nothing is released yet, or this machine has no exchange
        return ""
    try:
        if not place.is_file() or place.read_text(encoding="utf-8") != text:
            write_text(place, text)
            place.chmod(0o644)
    except (OSError, UserError) as error:
        return tr("students do not see these due dates: {file}: {reason}", file=place, reason=error)
    return ""


def rule_text(rule: LateRule) -> str:
    """Return the rule for late work in words for students; "" if late work loses nothing."""
    parts = []
    if rule.per_day.value:
        most = rule.at_most
        text = (
            "{points} less a day"
            if most == LateRule().at_most
            else "{points} less a day, at most {most} less"
        )
        parts.append(tr(text, points=rule.per_day, most=most))
    if rule.closed_after is not None:
        after = how_late(rule.closed_after.days * 86_400 + rule.closed_after.seconds)
        parts.append(tr("no points after {time}", time=after))
    return "; ".join(parts)


def settle_submission(
    submission: SubmittedAssignment, deadlines: Deadlines, step: AssignLatePenalties, gradebook: Any
) -> None:
    """Set the extension and the penalties of one submission; the caller commits.

    Args:
        step: has the plug-in that decides if the course file has no rule.
    """
    student, submitted = submission.student_id, submission.timestamp
    due = deadlines.of(student)
    if deadlines.file.exists:
        extended = due is not None and deadlines.due is not None and due > deadlines.due
        submission.extension = due - deadlines.due if extended else None  # type: ignore[operator]
    late = seconds_late(submission, deadlines)
    for notebook in submission.notebooks:
        penalty: float | None = None
        if late:
            gradebook.db.flush()  # the score is a sum that the database computes
            gradebook.db.refresh(notebook)
            if deadlines.rule.has_penalty:
                penalty = deadlines.penalty(student, submitted, notebook.score, notebook.max_score) or None
            else:
                step.init_plugin()
                penalty = step.plugin_inst.late_submission_penalty(student, notebook.score, late)
                penalty = None if penalty is None else step._check_late_penalty(notebook, penalty)
        if notebook.late_submission_penalty != penalty:  # without a change, no other program is disturbed
            notebook.late_submission_penalty = penalty


def seconds_late(submission: SubmittedAssignment, deadlines: Deadlines) -> float:
    """Return the seconds after the due date of a submission in the gradebook.

    Without a course file, an extension that was entered by nbgrader's ``grant_extension`` counts.
    """
    if not deadlines.file.exists and submission.extension is not None:
        return float(submission.total_seconds_late)
    return deadlines.seconds_late(submission.student_id, submission.timestamp)


class CoursePenalties(AssignLatePenalties):
    """nbgrader's step for late penalties, by the course file; for formgrader and ``nbgrader autograde``."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Set the extension and the penalty of the submission."""
        names = resources["nbgrader"]
        file = read_course_file(self.parent.parent.coursedir.root)
        with Gradebook(names["db_url"]) as gradebook:
            found = _deadlines(gradebook, names["assignment"], file)
            _check_plugin(self, found)
            row = gradebook.find_submission_notebook(names["notebook"], names["assignment"], names["student"])
            settle_submission(row.assignment, found, self, gradebook)
            gradebook.db.commit()
        return nb, resources


def deadlines_of(gradebook: Gradebook, lab: str, folder: str | Path) -> Deadlines:
    """Return the deadlines of the lab in the directory ``lab``, of the course in ``folder``."""
    return _deadlines(gradebook, lab, read_course_file(folder))


def _deadlines(gradebook: Gradebook, lab: str, file: CourseFile) -> Deadlines:
    due = file.of(lab).due
    if due is None:
        try:
            entered = gradebook.find_assignment(lab).duedate
        except MissingEntry:
            entered = None
        due = None if entered is None else entered.replace(tzinfo=UTC)
    return Deadlines(file, lab, due)


def _check_plugin(step: AssignLatePenalties, deadlines: Deadlines) -> None:
    step.init_plugin()
    own = step.plugin_class is not LateSubmissionPlugin or step.plugin_inst.penalty_method != "none"
    if own and deadlines.rule.has_penalty:
        text = "{file} sets penalties for late work, and so does nbgrader_config.py: remove one of the two"
        raise UserError(tr(text, file=deadlines.file.path))
