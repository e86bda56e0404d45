"""Enter a class into nbgrader's gradebook with the steps of ``nbgrader autograde``, and open the gradebook
once.

nbgrader's converter opens the gradebook seven times per submission, reads each cell's row separately,
validates the notebook after each step and does everything twice: 0.35 s of CPU time. Here, nbgrader's
preprocessors work on rows that are read together, and one commit ends a submission. The instructor's settings
(steps, hooks, penalties, ignored files, permissions) apply, and rows and files are the same. Cost: 0.04 s per
submission.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.api import Gradebook, SubmittedNotebook
from nbgrader.apps.api import NbGraderAPI
from nbgrader.converters import Autograde
from nbgrader.converters.base import BaseConverter
from nbgrader.preprocessors import AssignLatePenalties, CheckCellMetadata, NbGraderPreprocessor
from nbgrader.utils import find_all_files
from sqlalchemy.exc import SAWarning

from dlo_lib.base.files import write_text
from dlo_lib.grading.classroom.gradebook.deadlines import CoursePenalties, deadlines_of, settle_submission
from dlo_lib.grading.classroom.gradebook.export import grades_folder
from dlo_lib.grading.classroom.gradebook.gradebook_file import patient_url
from dlo_lib.grading.classroom.gradebook.manual_points import SaveScores, submitted_now
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.judge.preprocessor import reports
from dlo_lib.grading.judge.report import Report
from dlo_lib.grading.lab.course import LAB_FILE, LabInfo
from dlo_lib.grading.lab.release import write_source


class Rows:
    """The rows of one submitted notebook, with the part of ``Gradebook`` that nbgrader's
    preprocessors use.
    """

    def __init__(self, notebook: SubmittedNotebook) -> None:
        self._grades = {grade.name: grade for grade in notebook.grades}
        self._comments = {comment.name: comment for comment in notebook.comments}

    @property
    def db(self) -> Rows:
        """The object on which preprocessors call ``commit``."""
        return self

    def commit(self) -> None:
        """Do nothing, because one commit ends the whole submission."""

    def find_grade(self, cell: str, *_: str) -> Any:
        """Return the row of a test cell's score."""
        return self._grades[cell]

    def find_comment(self, cell: str, *_: str) -> Any:
        """Return the row of an answer's comment."""
        return self._comments[cell]


class SaveRows(SaveScores):
    """The step that saves scores, on rows read before."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Save the score and the comment of each cell."""
        names, entry = resources["nbgrader"], self.parent.parent
        self.name_row(names)
        rows = entry.gradebook.find_submission_notebook(self.notebook_id, self.assignment_id, self.student_id)
        self.gradebook, self.keep_manual = Rows(rows), self.keep_manual or entry.keep_manual
        self.save(nb, resources, rows, entry.grades, submitted_now(entry.original, rows))
        return nb, resources


class SavePenalty(AssignLatePenalties):
    """The step for late penalties, by the course file or the plug-in of the course, in the open gradebook."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Save the extension and the late penalty of the submission."""
        names, entry = resources["nbgrader"], self.parent.parent
        row = entry.gradebook.find_submission_notebook(
            names["notebook"], names["assignment"], names["student"]
        )
        settle_submission(row.assignment, entry.deadlines, self, entry.gradebook)
        return nb, resources


REPLACEMENTS: dict[type[NbGraderPreprocessor], type[NbGraderPreprocessor]] = {
    SaveScores: SaveRows,
    AssignLatePenalties: SavePenalty,
    CoursePenalties: SavePenalty,
}


@contextmanager
def _set(target: Any, **values: str) -> Iterator[None]:
    """Set attributes temporarily, as nbgrader's ``temp_attrs``, but restore them also after an exception."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def _put_back_after_error(folder: Path) -> Iterator[None]:
    """Move the graded notebook in ``folder`` aside, and back if an error prevents a new one."""
    aside = folder.with_name(f".{folder.name}.earlier")
    if folder.is_dir():
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        folder.rename(aside)
    try:
        yield
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


class GradebookEntry(Autograde):
    """Enters reports into the gradebook of ``course``. A context manager.

    Args:
        keep_manual: points and comments given by hand for an earlier submission count for a new one.
    """

    _sanitizing = False  # the notebooks were rebuilt from the release

    def __init__(self, course: NbGraderAPI, lab: LabInfo, keep_manual: bool = False) -> None:
        super().__init__(coursedir=course.coursedir, parent=course)
        self.lab, self.force, self.keep_manual = lab, True, keep_manual
        self.grades = grades_folder(course, lab)
        self.gradebook = Gradebook(patient_url(self.coursedir.db_url), self.coursedir.course_id)
        self.deadlines = deadlines_of(self.gradebook, lab.directory, self.coursedir.root)
        self.exporter = NotebookExporter(parent=self, config=self.config)
        self.exporter._preprocessors = []  # as nbgrader does before each of its two passes
        for step in self.autograde_preprocessors:
            # The release has passed this check, and the rebuilt notebook has its metadata. It would take
            # a third of the time of a row.
            if step is not CheckCellMetadata:
                self.exporter.register_preprocessor(REPLACEMENTS.get(step, step))

    def enter(self, student: str, submitted: Path, report: Report, original: Path) -> None:
        """Enter ``report`` and write the graded notebook.

        Args:
            submitted: has ``<student>/<lab>/`` with the rebuilt notebook.
            original: where the submitted notebook is expected.
        """
        name, self.original = self.lab.directory, original
        try:
            with (
                _set(
                    self.coursedir, assignment_id=name, student_id=student, submitted_directory=str(submitted)
                ),
                reports({student: report}),
                environment({"NBGRADER_EXECUTION": "autograde"}),
                warnings.catch_warnings(),
            ):
                # nbgrader's code causes this warning for each new submission.
                warnings.filterwarnings("ignore", "Object of type .* not in session", SAWarning)
                self.notebooks = [
                    self.coursedir.format_path(str(submitted), student, name) + f"/{self.lab.notebook}"
                ]
                with _put_back_after_error(Path(self._format_dest(name, student))):
                    if self.init_destination(name, student):
                        self.run_pre_convert_hook()
                        self.init_assignment(name, student)
                        self.convert_single_notebook(self.notebooks[0])
                        self.set_permissions(name, student)
                        self.run_post_convert_hook()
        except BaseException:
            self.gradebook.db.rollback()
            raise

    def withdraw(self, student: str) -> None:
        """Remove the scores of an earlier grading; keep those entered by hand, and mark them for another
        review.
        """
        self.gradebook.db.rollback()
        shutil.rmtree(self._format_dest(self.lab.directory, student), ignore_errors=True)
        for submission in self.gradebook.assignment_submissions(self.lab.directory):
            if submission.student_id == student:
                for grade in (grade for notebook in submission.notebooks for grade in notebook.grades):
                    grade.auto_score, grade.needs_manual_grade = 0.0, grade.manual_score is not None
        self.gradebook.db.commit()

    def init_assignment(self, assignment_id: str, student_id: str) -> None:
        """Create the rows of student and submission; copy the submitted files, and the lab's files
        over them.
        """
        BaseConverter.init_assignment(self, assignment_id, student_id)
        self._copy_sources(Path(self._format_dest(assignment_id, student_id)))
        self.gradebook.update_or_create_student(student_id)
        timestamp = self.coursedir.get_existing_timestamp(self._format_source(assignment_id, student_id))
        given = {} if timestamp is None else {"timestamp": timestamp}
        self.gradebook.update_or_create_submission(assignment_id, student_id, **given)

    def convert_single_notebook(self, notebook_filename: str) -> None:
        """Run the steps on the notebook, commit its rows, and write it."""
        resources: Any = ResourcesDict()
        resources.update(self.init_single_notebook_resources(notebook_filename))
        notebook = nbformat.v4.reads(Path(notebook_filename).read_text(encoding="utf-8"))
        for step in self.exporter._preprocessors:
            notebook, resources = step(notebook, resources)
        text = nbformat.writes(notebook, version=4)
        self.gradebook.db.commit()
        names = resources["nbgrader"]
        write_text(
            Path(self._format_dest(names["assignment"], names["student"])) / self.lab.notebook,
            text + "\n",
        )

    @property
    def _input_directory(self) -> str:
        return self.coursedir.submitted_directory

    def _copy_sources(self, target: Path) -> None:
        source = self.coursedir.format_path(self.coursedir.source_directory, ".", self.lab.directory)
        if not os.path.exists(os.path.join(source, LAB_FILE)):  # a course of an earlier version
            write_source(self.lab, Path(source))
        own = {os.path.join(source, name) for name in self.exclude_overwriting.get(self.lab.directory, [])}
        for file in set(find_all_files(source, [*self.coursedir.ignore, "*.ipynb"])) - own:
            place = target / os.path.relpath(file, source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            shutil.copy(file, place)

    def __enter__(self) -> GradebookEntry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gradebook.close()
