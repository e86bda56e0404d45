"""Grading a whole class: one row for each student of the roster, whatever was handed in.

Submissions are judged by children of a judging service, several at once; each leaves a report file. This process alone writes gradebook,
graded notebooks and results, one student after another, through nbgrader's own converter with the report in place of an execution.
Whoever ran out of time or memory is judged again with nobody beside them before it counts. What was killed is resumed from the reports
whose key is still right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgrader.apps.api import NbGraderAPI

from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.entry import Entry
from dlo_lib.grading.export import REPORTS, GradeTable, grades_folder, read_grades, write_results
from dlo_lib.grading.handed_in import FOLDER, staged
from dlo_lib.grading.isolation import required_isolation
from dlo_lib.grading.judging import LOG_FILE, Job, Judges, JudgingService, read_secret
from dlo_lib.grading.lock import only_grader
from dlo_lib.grading.nbgrader_course import open_course
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.report import GRADER_ERROR, Report
from dlo_lib.grading.roster import read_roster, unknown_student
from dlo_lib.grading.source import TEST_PREFIX, CellKind, LabSource, notebook_text, read_lab, source_folder
from dlo_lib.grading.stale import remove_stale
from dlo_lib.grading.status import Status
from dlo_lib.grading.stored import Stored, lab_key, load, report_file, submission_key
from dlo_lib.text import tr

STARVED = (Status.TIMEOUT.value, Status.OOM.value)


@dataclass(frozen=True)
class Done:
    """A submission whose row stands, the ``number``-th ``of`` so many; points as the judge gave them."""

    student: str
    status: str
    points: float
    maximum: float
    number: int
    of: int


@dataclass(frozen=True)
class Options:
    """How to grade: ``jobs`` at once; ``resume`` takes the reports that are still right; ``only`` one student; ``unsafe``: no sandbox."""

    jobs: int = 1
    resume: bool = False
    only: str | None = None
    unsafe: bool = False


Advance = Callable[[Done], None]


def grade_lab(
    lab: LabInfo,
    folder: str | Path = ".",
    advance: Advance | None = None,
    options: Options | None = None,
    judges: Judges | None = None,
) -> GradeTable:
    """Grade the collected submissions of ``lab`` in the course of ``folder``: gradebook, graded notebooks, and ``grades/<lab>/``.

    Args:
        judges: started beforehand for this lab and course, or on other machines; their maker ends them.

    Raises:
        UserError: ``folder`` is no course of ours, the lab was never released there or has other questions since, nothing was collected,
            the host has no sandbox, the reference solution does not score full marks, or another grader is at work on the lab.
    """
    chosen = options or Options()
    course = open_course(folder)
    source = read_lab(source_folder(lab))
    released(course, lab)
    _check_cells(course, source)
    students = submitted_students(course, lab)
    if not students:
        raise UserError(f"no submission of {lab.directory} in {course.coursedir.root}: `dlo collect {lab.directory}` fetches them")
    if chosen.only is not None and chosen.only not in students:
        if chosen.only not in (roster := [person.id for person in read_roster(course)]):
            raise unknown_student(chosen.only, roster)
        raise UserError(tr("{student} has handed in nothing of {lab}", student=chosen.only, lab=lab.directory))
    sandbox = "none" if chosen.unsafe else required_isolation().name
    remove_stale(FOLDER)
    with only_grader(grades_folder(course, lab)) as results:
        chosen_students = [chosen.only] if chosen.only is not None else students
        with Entry(course, lab) as entry:
            batch = _Batch(entry, source, results / REPORTS, sandbox, chosen, judges)
            for number, (student, report) in enumerate(batch.run(chosen_students), 1):
                if advance is not None:
                    advance(Done(student, report.status, report.points, batch.lab.points, number, len(chosen_students)))
        table = read_grades(course, lab)
        write_results(course, table)
    return table


class _Batch:
    """One run over a class."""

    def __init__(self, entry: Entry, lab: LabSource, folder: Path, sandbox: str, options: Options, started: Judges | None) -> None:
        self.entry, self.lab, self.folder, self.options, self.started = entry, lab, folder, options, started
        root = Path(entry.coursedir.root)
        self.course, self.log = root, root / LOG_FILE
        self.key = lab_key(lab, read_secret(root), sandbox)
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
        for job in todo:
            job.report.unlink(missing_ok=True)  # an earlier verdict must not stand for one that does not come
        with nullcontext(self.started) if self.started else JudgingService(self.lab.info, self.course, self.options.unsafe) as judges:
            judged, again = [], []
            for job, code in judges.looked_at(todo, self.options.jobs):
                if code == 0:
                    yield self._write(job)
                else:
                    judged.append(job)
            order = {job: place for place, job in enumerate(todo)}
            for job, _ in judges.judged(sorted(judged, key=order.__getitem__), self.options.jobs) if judged else ():
                if self._starved(job):
                    again.append(job)
                else:
                    yield self._write(job)
            for job, _ in judges.judged(sorted(again, key=order.__getitem__), 1) if again else ():
                yield self._write(job)

    def _job(self, student: str) -> Job:
        handed_in = Path(self.entry.coursedir.format_path(self.entry.coursedir.submitted_directory, student, self.lab.info.directory))
        notebook = handed_in / self.lab.info.notebook
        return Job(student, notebook, report_file(self.folder, student), submission_key(self.key, notebook))

    def _stored(self, job: Job) -> Stored | None:
        stored = load(job.report)
        return stored if stored is not None and stored.key == job.key else None

    def _counts(self, job: Job) -> bool:
        stored = self._stored(job)
        return stored is not None and not stored.report.status.startswith(GRADER_ERROR) and (stored.alone or not _ran_out(stored.report))

    def _starved(self, job: Job) -> bool:
        stored = self._stored(job)
        return stored is None or (not stored.alone and _ran_out(stored.report))

    def _write(self, job: Job) -> tuple[str, Report]:
        stored = self._stored(job)
        if stored is None:
            stored = Stored(job.key, Report(self.lab.info.directory, GRADER_ERROR, {}), True, {})
            write_text(job.rebuilt, notebook_text(release_notebook(self.lab.folder)))
            stored.save(job.report)
            self._note(job.student, "no judge of this submission came to an end: see above")
        for question in stored.report.questions.values():
            for check in question.checks:
                if check.status == GRADER_ERROR:
                    self._note(job.student, f"check {check.name}: {check.message}")
        try:
            with staged(job.student, job.notebook, job.rebuilt) as submitted:
                self.entry.enter(job.student, submitted, stored.report)
        except Exception as error:  # noqa: BLE001  one row that cannot be written must not stop the others
            self._note(job.student, f"not in the gradebook: {type(error).__name__}: {error}")
            self.entry.withdraw(job.student)
        return job.student, stored.report

    def _note(self, student: str, text: str) -> None:
        with open(self.log, "a", encoding="utf-8", errors="replace") as log:
            log.write(f"--- {student}: {text}\n")


def _check_cells(course: NbGraderAPI, lab: LabSource) -> None:
    """Raises:
    UserError: the gradebook has not the questions, or not the points, of ``lab`` as it is now."""
    with course.gradebook as gradebook:
        notebook = gradebook.find_notebook(lab.info.name, lab.info.directory)
        known = {cell.name: cell.max_score for cell in notebook.grade_cells}
    asked = {cell.id: cell.points for cell in lab.cells if cell.kind is CellKind.TEST}
    if changed := sorted(name.removeprefix(TEST_PREFIX) for name, _ in known.items() ^ asked.items()):
        text = (
            "{lab} was changed after its release ({questions}): generate it again; nbgrader takes new ones only while nobody has handed in"
        )
        raise UserError(tr(text, lab=lab.info.directory, questions=", ".join(dict.fromkeys(changed))))


def _ran_out(report: Report) -> bool:
    return any(check.status in STARVED for question in report.questions.values() for check in question.checks)


def grade_lab_stock(lab: LabInfo, folder: str | Path = ".") -> GradeTable:
    """The grades nbgrader gives the same submissions when it runs the notebooks itself: a cross-check, in ``stock/`` of the course.

    Honest students get the same points from both. A notebook can talk this one into points: never publish its grades.

    Raises:
        UserError: ``folder`` is no course of ours.
    """
    course = open_course(folder, stock=True)
    run_step(course, "stock generate", course.generate_assignment(lab.directory))
    released(course, lab)
    for student in submitted_students(course, lab):
        log_step(course, f"autograde {student}", course.autograde(lab.directory, student))
    return read_grades(course, lab)


def released(course: NbGraderAPI, lab: LabInfo) -> None:
    """Raises:
    UserError: the gradebook does not know the lab."""
    with course.gradebook as gradebook:
        if lab.directory not in {assignment.name for assignment in gradebook.assignments}:
            raise UserError(f"{lab.directory} is not in the gradebook: `dlo release {lab.directory}` comes first")


def submitted_students(course: NbGraderAPI, lab: LabInfo) -> list[str]:
    """The students whose submission of ``lab`` was collected, in order."""
    return sorted(course.get_submitted_students(lab.directory))


def run_step(course: NbGraderAPI, name: str, result: dict[str, Any]) -> None:
    """Log what nbgrader said of a step that concerns the whole class.

    Raises:
        UserError: the step failed; its last line and the log are named.
    """
    log = log_step(course, name, result)
    if not result["success"]:
        last = result["error"].strip().splitlines()[-1]
        raise UserError(f"nbgrader's step {name!r} failed: {last} (all of it is in {log})")


def log_step(course: NbGraderAPI, name: str, result: dict[str, Any]) -> Path:
    """Append what nbgrader said of a step to the course's log."""
    file = Path(course.coursedir.root) / LOG_FILE
    with open(file, "a", encoding="utf-8", errors="replace") as log:
        log.write(f"--- {name}: {'done' if result['success'] else 'failed'}\n{result.get('log', '')}{result.get('error', '')}\n")
    return file
