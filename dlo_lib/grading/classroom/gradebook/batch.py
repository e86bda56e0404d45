"""Grade a whole class: one row for each student of the roster, for any submission.

Children of a judging service judge the submissions, several at once; each writes a report file. Only this
process writes the gradebook, the graded notebooks and the results, one student after another, through
nbgrader's converter, with the report in place of an execution. A submission that runs out of time or memory
is judged again, alone, before that counts. A killed batch resumes with the reports whose key is still valid.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.temporary_folders import remove_stale
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.status import Status, unreadable
from dlo_lib.grading.classroom.gradebook.deadlines import settle
from dlo_lib.grading.classroom.gradebook.export import (
    REPORTS,
    GradeTable,
    changed_checks,
    grades_folder,
    read_grades,
    results_before,
    write_results,
)
from dlo_lib.grading.classroom.gradebook.gradebook_entry import GradebookEntry
from dlo_lib.grading.classroom.gradebook.gradebook_file import LOCK_SECONDS, back_up, is_full, is_locked
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import (
    check_cells,
    require_release,
    submitted_students,
)
from dlo_lib.grading.classroom.gradebook.regrade import (
    CHANGES,
    begin_grading,
    changes_of,
    end_grading,
    keep_points,
    unfinished_note,
    write_changes,
)
from dlo_lib.grading.classroom.gradebook.submission_copy import FOLDER, staged_copy
from dlo_lib.grading.classroom.gradebook.timings import write_timings
from dlo_lib.grading.classroom.roster.roster import read_roster, unknown_student
from dlo_lib.grading.judge.array import JudgesStopped
from dlo_lib.grading.judge.client import LOG_FILE, JudgeClient, JudgeJob, Judges, Waiting, read_secret
from dlo_lib.grading.judge.grader_lock import only_grader
from dlo_lib.grading.judge.report import GRADER_ERROR, Report
from dlo_lib.grading.judge.report_store import StoredReport, lab_key, load, report_file, submission_key
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import (
    LabSource,
    notebook_text,
    read_lab,
    source_folder,
)
from dlo_lib.grading.sandbox.isolation import required_isolation

EXHAUSTED = (Status.TIMEOUT.value, Status.OOM.value)
LEAST_FREE = 32 << 20  # bytes on the disk of the course; a row needs a few MB


@dataclass(frozen=True)
class Done:
    """A submission whose row is written, number ``number`` of ``of``; points as the judge gave them."""

    student: str
    status: str
    points: float
    maximum: float
    number: int
    of: int


@dataclass(frozen=True)
class Options:
    """Options of a batch.

    Args:
        jobs: submissions judged at once.
        resume: use the reports that are still valid.
        only: grade only this student.
        unsafe: judge without a sandbox.
        keep_manual: points and comments given by hand for an earlier submission count for a new one.
    """

    jobs: int = 1
    resume: bool = False
    only: str | None = None
    unsafe: bool = False
    keep_manual: bool = False


Advance = Callable[[Done], None]


def grade_lab(
    lab: LabInfo,
    folder: str | Path = ".",
    advance: Advance | None = None,
    options: Options | None = None,
    judges: Judges | None = None,
    waiting: Waiting | None = None,
) -> GradeTable:
    """Grade the collected submissions of ``lab`` in the course of ``folder``.

    Writes the gradebook, the graded notebooks, and ``grades/<lab>/``, also if judges on other machines end
    before all submissions are judged; the table then has ``stopped``.

    Args:
        advance: called after each student.
        judges: started beforehand for this lab and course, or on other machines; the caller ends them.
        waiting: called about once a second while submissions are judged.

    Raises:
        UserError: ``folder`` is no course of this library, the lab was not released there or has other
            questions since, its course file is wrong, nothing was collected, the host has no sandbox, the
            reference solution does not score full marks, or another process grades the lab.
    """
    chosen = options or Options()
    course = open_course(folder)
    source = read_lab(source_folder(lab))
    require_release(course, lab)
    check_cells(course, source)
    settle(course, lab)  # a wrong course file is refused before anything is judged
    students = submitted_students(course, lab)
    if not students:
        raise UserError(
            f"no submission of {lab.directory} in {course.coursedir.root}: "
            f"`dlo collect {lab.directory}` fetches them"
        )
    if chosen.only is not None and chosen.only not in students:
        if chosen.only not in (roster := [person.id for person in read_roster(course)]):
            raise unknown_student(chosen.only, roster)
        raise UserError(
            tr("{student} has submitted nothing of {lab}", student=chosen.only, lab=lab.directory),
        )
    sandbox = "none" if chosen.unsafe else required_isolation().name
    remove_stale(FOLDER)
    with only_grader(grades_folder(course, lab)) as results:
        before = results_before(course, lab)
        keep_points(results, results / REPORTS, {student: checks for student, (_, checks) in before.items()})
        back_up(course)
        # one row more does not complete an interrupted grading of the class
        completes = chosen.only is None or not unfinished_note(results)
        before = begin_grading(results, before)
        chosen_students = [chosen.only] if chosen.only is not None else students
        stopped = ""
        with GradebookEntry(course, lab, chosen.keep_manual) as entry:
            batch = _Batch(entry, source, results / REPORTS, sandbox, chosen, judges, waiting)
            try:
                for number, (student, report) in enumerate(batch.run(chosen_students), 1):
                    if advance is not None:
                        advance(
                            Done(
                                student,
                                report.status,
                                report.points,
                                batch.lab.points,
                                number,
                                len(chosen_students),
                            )
                        )
            except JudgesStopped as error:  # the rows that are written stand
                stopped = str(error)
        (results / CHANGES).unlink(missing_ok=True)
        table = read_grades(course, lab)
        versions = {row.student: row.checks for row in table.rows}
        changed = write_changes(results, changes_of(results, results / REPORTS, versions))
        table = replace(table, judged=tuple(batch.judged))
        write_results(course, table)
        write_timings(results, table)
        if completes and not stopped:
            end_grading(results)
    return replace(table, notes=(*changed_checks(before, table), *changed, *table.notes), stopped=stopped)


class _Batch:
    """One batch over a class."""

    def __init__(
        self,
        entry: GradebookEntry,
        lab: LabSource,
        folder: Path,
        sandbox: str,
        options: Options,
        started: Judges | None,
        waiting: Waiting | None,
    ) -> None:
        self.entry, self.lab, self.folder, self.options = entry, lab, folder, options
        self.started, self.waiting = started, waiting
        root = Path(entry.coursedir.root)
        self.course, self.log = root, root / LOG_FILE
        self.key = lab_key(lab, read_secret(root), sandbox)
        self.judged: list[str] = []
        """The students whose submissions were judged, and not only read again."""
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, students: Iterable[str]) -> Iterator[tuple[str, Report]]:
        """Each student with the report, when their row stands."""
        jobs = [self._job(student) for student in students]
        done = [job for job in jobs if self.options.resume and self._counts(job)]
        for job in done:
            yield self._write(job)
        todo = [job for job in jobs if job not in done]
        if not todo:
            return
        self.judged = [job.student for job in todo]
        for job in todo:
            job.report.unlink(missing_ok=True)  # without a new report, an earlier one must not count
        with (
            nullcontext(self.started)
            if self.started
            else JudgeClient(self.lab.info, self.course, self.options.unsafe) as judges
        ):
            judged, again = [], []
            for job, code in judges.screen(todo, self.options.jobs):
                if code == 0:
                    yield self._write(job)
                else:
                    judged.append(job)
            order = {job: place for place, job in enumerate(todo)}
            judged.sort(key=order.__getitem__)
            for job, _ in judges.judge(judged, self.options.jobs, self.waiting) if judged else ():
                if self._must_repeat(job):
                    again.append(job)
                else:
                    yield self._write(job)
            again.sort(key=order.__getitem__)
            for job, _ in judges.judge(again, 1, self.waiting) if again else ():
                yield self._write(job)

    def _job(self, student: str) -> JudgeJob:
        submitted = Path(
            self.entry.coursedir.format_path(
                self.entry.coursedir.submitted_directory,
                student,
                self.lab.info.directory,
            )
        )
        notebook = submitted / self.lab.info.notebook
        return JudgeJob(
            student,
            notebook,
            report_file(self.folder, student),
            submission_key(self.key, notebook),
        )

    def _stored(self, job: JudgeJob) -> StoredReport | None:
        stored = load(job.report)
        return stored if stored is not None and stored.key == job.key else None

    def _counts(self, job: JudgeJob) -> bool:
        stored = self._stored(job)
        return (
            stored is not None
            and not stored.report.status.startswith(GRADER_ERROR)
            and (stored.alone or not _ran_out(stored.report))
        )

    def _must_repeat(self, job: JudgeJob) -> bool:
        stored = self._stored(job)
        return stored is None or (not stored.alone and _ran_out(stored.report))

    def _write(self, job: JudgeJob) -> tuple[str, Report]:
        stored = self._stored(job)
        if stored is None:
            stored = StoredReport(job.key, Report(self.lab.info.directory, GRADER_ERROR, {}), True, {})
            write_text(job.rebuilt, notebook_text(release_notebook(self.lab.folder)))
            stored.save(job.report)
            self._note(job.student, "no judge finished this submission: see above")
        for question in stored.report.questions.values():
            for check in question.checks:
                if check.status == GRADER_ERROR or check.message.startswith(unreadable()):
                    self._note(job.student, f"check {check.name}: {check.message}")
        if shutil.disk_usage(self.course).free < LEAST_FREE:
            raise self._full_disk()  # before an earlier row of this student is touched
        try:
            with staged_copy(job.student, job.notebook, job.rebuilt) as submitted:
                self.entry.enter(job.student, submitted, stored.report, job.notebook)
        except Exception as error:  # one row that cannot be written must not stop the others
            if is_full(error):
                raise self._full_disk() from error
            if is_locked(error):
                raise self._locked() from error
            self._note(job.student, f"not in the gradebook: {type(error).__name__}: {error}")
            self.entry.withdraw(job.student)
            return job.student, Report(self.lab.info.directory, GRADER_ERROR, {})
        return job.student, stored.report

    def _full_disk(self) -> UserError:
        return UserError(
            tr(
                "the disk of {folder} is full: free some space, then `dlo grade {lab} --resume`; the rows "
                "before this one are stored, and the others keep their earlier scores",
                folder=self.course,
                lab=self.lab.info.directory,
            )
        )

    def _locked(self) -> UserError:
        return UserError(
            tr(
                "another program has held the gradebook of {folder} for {seconds:.0f} s: end it, then "
                "`dlo grade {lab} --resume`; the rows before this one are stored, and the others keep their "
                "earlier scores",
                folder=self.course,
                seconds=LOCK_SECONDS,
                lab=self.lab.info.directory,
            )
        )

    def _note(self, student: str, text: str) -> None:
        with open(self.log, "a", encoding="utf-8", errors="replace") as log:
            log.write(f"--- {student}: {text}\n")


def _ran_out(report: Report) -> bool:
    checks = (check for question in report.questions.values() for check in question.checks)
    return any(check.status in EXHAUSTED for check in checks)
