"""A class entered into nbgrader's gradebook: the steps and the rows of its own ``autograde``, with the gradebook opened once for all.

nbgrader's converter opens the gradebook seven times a submission, reads each cell's row by itself, validates the notebook after each step
and goes through all of it twice: 0.35 s of CPU time. Here its own preprocessors work on rows that were read together, and one commit ends a
submission. Settings of the instructor's (steps, hooks, penalties, ignored files, permissions) hold as they do there, and the rows and files
are the same. Cost: 0.04 s a submission.
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
from nbgrader.preprocessors import AssignLatePenalties, NbGraderPreprocessor, SaveAutoGrades
from nbgrader.utils import find_all_files
from sqlalchemy.exc import SAWarning

from dlo_lib.files import write_text
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.environ import environment
from dlo_lib.grading.judge_cells import reports
from dlo_lib.grading.report import Report


class Rows:
    """The rows of one submitted notebook, read at once: as much of a ``Gradebook`` as nbgrader's preprocessors ask for."""

    def __init__(self, notebook: SubmittedNotebook) -> None:
        self._grades = {grade.name: grade for grade in notebook.grades}
        self._comments = {comment.name: comment for comment in notebook.comments}

    @property
    def db(self) -> Rows:
        """What they commit to."""
        return self

    def commit(self) -> None:
        """Not yet: all rows of a submission become valid together."""

    def find_grade(self, cell: str, *_: str) -> Any:
        """The row of a test cell's score."""
        return self._grades[cell]

    def find_comment(self, cell: str, *_: str) -> Any:
        """The row of an answer's comment."""
        return self._comments[cell]


class SaveRows(SaveAutoGrades):
    """nbgrader's step that saves scores, on rows that are at hand."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Score and comment of each cell."""
        told, entry = resources["nbgrader"], self.parent.parent
        self.notebook_id, self.assignment_id, self.student_id = told["notebook"], told["assignment"], told["student"]
        self.gradebook = Rows(entry.gradebook.find_submission_notebook(self.notebook_id, self.assignment_id, self.student_id))
        for index, cell in enumerate(nb.cells):
            nb.cells[index], resources = self.preprocess_cell(cell, resources, index)
        return nb, resources


class SavePenalty(AssignLatePenalties):
    """nbgrader's step that asks the course's plug-in for the penalty of a late submission, in the gradebook that is open."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """The penalty of the notebook."""
        told, gradebook = resources["nbgrader"], self.parent.parent.gradebook
        row = gradebook.find_submission_notebook(told["notebook"], told["assignment"], told["student"])
        row.late_submission_penalty = None
        late = row.assignment.total_seconds_late
        if late > 0:
            gradebook.db.commit()  # the score is a sum in the database
            self.init_plugin()
            penalty = self.plugin_inst.late_submission_penalty(told["student"], row.score, late)
            row.late_submission_penalty = None if penalty is None else self._check_late_penalty(row, penalty)
        return nb, resources


OURS: dict[type[NbGraderPreprocessor], type[NbGraderPreprocessor]] = {SaveAutoGrades: SaveRows, AssignLatePenalties: SavePenalty}


@contextmanager
def _set(target: Any, **values: str) -> Iterator[None]:
    """nbgrader's ``temp_attrs``, but an exception does not leave the values behind."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


class Entry(Autograde):
    """The way of a class into the gradebook of ``course``. A context manager."""

    _sanitizing = False  # what is entered was rebuilt from the release

    def __init__(self, course: NbGraderAPI, lab: LabInfo) -> None:
        super().__init__(coursedir=course.coursedir, parent=course)
        self.lab, self.force = lab, True
        self.gradebook = Gradebook(self.coursedir.db_url, self.coursedir.course_id)
        self.exporter = NotebookExporter(parent=self, config=self.config)
        self.exporter._preprocessors = []  # as nbgrader does before each of its two passes
        for step in self.autograde_preprocessors:
            self.exporter.register_preprocessor(OURS.get(step, step))

    def enter(self, student: str, submitted: Path, report: Report) -> None:
        """Enter ``report`` and write the graded notebook; ``submitted`` holds ``<student>/<lab>/`` with the rebuilt notebook."""
        name = self.lab.directory
        try:
            with (
                _set(self.coursedir, assignment_id=name, student_id=student, submitted_directory=str(submitted)),
                reports({student: report}),
                environment({"NBGRADER_EXECUTION": "autograde"}),
                warnings.catch_warnings(),
            ):
                # nbgrader's own, for each new submission
                warnings.filterwarnings("ignore", "Object of type .* not in session", SAWarning)
                self.notebooks = [self.coursedir.format_path(str(submitted), student, name) + f"/{self.lab.notebook}"]
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
        """No score of an earlier grading stands any more; what people entered by hand does, and is marked for another look."""
        self.gradebook.db.rollback()
        shutil.rmtree(self._format_dest(self.lab.directory, student), ignore_errors=True)
        for submission in self.gradebook.assignment_submissions(self.lab.directory):
            if submission.student_id == student:
                for grade in (grade for notebook in submission.notebooks for grade in notebook.grades):
                    grade.auto_score, grade.needs_manual_grade = 0.0, grade.manual_score is not None
        self.gradebook.db.commit()

    def init_assignment(self, assignment_id: str, student_id: str) -> None:
        """The student's and the submission's rows; the files that were handed in, and the lab's own over them."""
        BaseConverter.init_assignment(self, assignment_id, student_id)
        self._copy_sources(Path(self._format_dest(assignment_id, student_id)))
        self.gradebook.update_or_create_student(student_id)
        timestamp = self.coursedir.get_existing_timestamp(self._format_source(assignment_id, student_id))
        given = {} if timestamp is None else {"timestamp": timestamp}
        self.gradebook.update_or_create_submission(assignment_id, student_id, **given)

    def convert_single_notebook(self, notebook_filename: str) -> None:
        """Run the steps on the notebook, make its rows valid, and write it."""
        resources: Any = ResourcesDict()
        resources.update(self.init_single_notebook_resources(notebook_filename))
        notebook = nbformat.v4.reads(Path(notebook_filename).read_text(encoding="utf-8"))
        for step in self.exporter._preprocessors:
            notebook, resources = step(notebook, resources)
        text = nbformat.writes(notebook, version=4)
        self.gradebook.db.commit()
        told = resources["nbgrader"]
        write_text(Path(self._format_dest(told["assignment"], told["student"])) / self.lab.notebook, text + "\n")

    @property
    def _input_directory(self) -> str:
        return self.coursedir.submitted_directory

    def _copy_sources(self, target: Path) -> None:
        source = self.coursedir.format_path(self.coursedir.source_directory, ".", self.lab.directory)
        own = {os.path.join(source, name) for name in self.exclude_overwriting.get(self.lab.directory, [])}
        for file in set(find_all_files(source, [*self.coursedir.ignore, "*.ipynb"])) - own:
            place = target / os.path.relpath(file, source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            shutil.copy(file, place)

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.gradebook.close()
