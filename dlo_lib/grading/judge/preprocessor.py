"""Grade inside nbgrader's pipeline: put the judge's verdicts into the test cells, without executing the
submitted notebook.

``SubmissionExporter`` reads any submitted file and rebuilds the notebook from the release and the student's
answers, so that edited test cells, lost cells and broken metadata need no special case. ``JudgeCells``
replaces nbgrader's execution of the notebook. It gives each test cell one output, the points as nbgrader
reads partial credit, so that gradebook, feedback, late penalties and formgrader keep working. Every test cell
gets an output, because nbgrader gives full marks to a test cell without one.

A batch passes its reports (:func:`reports`). ``nbgrader autograde`` and formgrader's button use a judging
service that their course directory owns.
"""

from __future__ import annotations

import html
import math
import re
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output
from nbgrader.converters import NbGraderException
from nbgrader.preprocessors import Execute, NbGraderPreprocessor
from nbgrader.utils import is_grade
from traitlets import Bool

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.verdict import releases
from dlo_lib.grading.judge.client import LOG_FILE as LOG_FILE
from dlo_lib.grading.judge.client import SECRET_FILE as SECRET_FILE
from dlo_lib.grading.judge.client import JudgeClient, JudgeJob, read_secret
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.judge.grader_lock import only_grader
from dlo_lib.grading.lab.course import LAB_FILE, find_lab, given_folder, source_labs
from dlo_lib.grading.lab.source import TEST_PREFIX, LabSource, read_lab, source_folder, text_source

if TYPE_CHECKING:
    from nbgrader.coursedir import CourseDirectory

    from dlo_lib.grading.judge.report import QuestionReport, Report

STATUS_CELL = "dlo-status"

# nbgrader creates a preprocessor for each notebook; a batch passes its reports through this variable.
_reports: ContextVar[Mapping[str, Report]] = ContextVar("reports")


@contextmanager
def reports(of: Mapping[str, Report]) -> Iterator[None]:
    """Use the reports in ``of``, by student, instead of judging; a context manager."""
    token = _reports.set(of)
    try:
        yield
    finally:
        _reports.reset(token)


class CourseJudges:
    """The judging services of one course, one per lab; each starts when it is first needed.

    nbgrader creates a converter for every run and does not report the end of an application. The course
    directory lives as long as ``nbgrader autograde`` or formgrader, so it owns its judges: they are closed
    when it is collected or when the process ends.
    """

    def __init__(self, course: Path) -> None:
        self.course = course
        self._services: dict[Path, tuple[str, JudgeClient]] = {}

    @classmethod
    def of(cls, directory: CourseDirectory) -> CourseJudges:
        """Return the services that ``directory`` owns."""
        found = getattr(directory, "judges", None)
        if found is None:
            found = directory.judges = cls(Path(directory.root))  # type: ignore[attr-defined]
            weakref.finalize(directory, found.close)
        return found

    def judge(self, lab: LabSource, notebook: Path, unsafe: bool) -> Report:
        """Return the report of one submission to ``lab``.

        Raises:
            UserError: this host has no sandbox, or the reference solution does not score full marks.
        """
        from dlo_lib.grading.judge.report import GRADER_ERROR, Report
        from dlo_lib.grading.judge.report_store import lab_key, load
        from dlo_lib.grading.sandbox.isolation import required_isolation

        if not unsafe:
            required_isolation()
        key = lab_key(lab, read_secret(self.course), str(unsafe))
        with tempfile.TemporaryDirectory(prefix="dlo-report-") as folder:
            job = JudgeJob("", notebook, Path(folder) / "report.json", key)
            list(self._service(lab, key, unsafe).judge([job], 1))
            stored = load(job.report)
        return stored.report if stored is not None else Report(lab.info.directory, GRADER_ERROR, {})

    def close(self) -> None:
        """End all services."""
        for _, service in self._services.values():
            service.close()
        self._services.clear()

    def _service(self, lab: LabSource, key: str, unsafe: bool) -> JudgeClient:
        known = self._services.get(lab.folder)
        if known is None or known[0] != key or not known[1].alive:
            if known is not None:
                known[1].close()
            self._services[lab.folder] = (key, JudgeClient(lab.info, self.course, unsafe))
        return self._services[lab.folder][1]


class SubmissionExporter(NotebookExporter):
    """Exports, for any submitted file, the released notebook with the student's answers."""

    def __init__(self, **settings: Any) -> None:
        """Check the sandbox before the first submission: nbgrader then prints one line instead of a
        traceback.
        """
        super().__init__(**settings)
        converter: Any = self.parent
        if not JudgeCells(parent=self).unsafe:
            from dlo_lib.grading.sandbox.isolation import required_isolation

            with self._refusing():
                required_isolation()
        # nbgrader creates an exporter at the start of a run and does not report its end, so the run holds the
        # lock.
        converter.convert_notebooks = partial(self._alone, converter.convert_notebooks, converter.coursedir)

    def _alone(self, convert: Callable[[], None], course: CourseDirectory) -> None:
        with ExitStack() as stack:
            with self._refusing():
                stack.enter_context(only_grader(Path(course.root) / "grades" / course.assignment_id))
            convert()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.log.error(str(error))
            raise NbGraderException(str(error)) from None

    def from_filename(self, filename: str, resources: Any = None, **kw: Any) -> tuple[Any, dict[str, Any]]:
        """Run the preprocessors on the rebuilt notebook; a batch, or nbgrader's first pass, has already
        rebuilt it.
        """
        # Imported here, because every nbgrader command loads this module and few of them grade.
        from dlo_lib.grading.judge.rebuilt_notebook import rebuild_file

        path = Path(filename)
        ready = not getattr(self.parent, "_sanitizing", True) or resources["nbgrader"][
            "student"
        ] in _reports.get({})
        rebuilt = nbformat.read(path, as_version=4) if ready else rebuild_file(_lab(resources), path)
        return self.from_notebook_node(rebuilt, resources, **kw)


class JudgeCells(NbGraderPreprocessor):
    """Gets the judge's report of the submission and puts each question's verdict under its test cell."""

    unsafe = Bool(
        False,
        help="Judge without a sandbox where the host has none; every status is then marked UNSANDBOXED.",
    ).tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Judge the submitted file, not ``nb``, which was rebuilt from it."""
        from dlo_lib.grading.judge.report import student_view
        from dlo_lib.grading.judge.report_store import checks_version

        submission, lab, course = resources["nbgrader"], _lab(resources), self.parent.parent.coursedir
        known = _reports.get({}).get(submission["student"])
        student, assignment = submission["student"], submission["assignment"]
        submitted = Path(course.format_path(course.submitted_directory, student, assignment))
        report = known or self._report(lab, submitted / lab.info.notebook, course)
        for cell in filter(is_grade, nb.cells):
            question = report.questions.get(cell.metadata.nbgrader.grade_id.removeprefix(TEST_PREFIX))
            cell.outputs = [verdict_output(question, float(cell.metadata.nbgrader.points))]
        # Feedback pages read this, also when nbgrader's own commands grade.
        nb.metadata.dlo = {
            "lab": lab.info.directory,
            "status": report.status,
            "report": student_view(report),
            "checks": checks_version(lab.folder),
            **releases(),
        }
        nb.cells = [status_cell(report), *nb.cells]
        return nb, resources

    def _report(self, lab: LabSource, path: Path, course: CourseDirectory) -> Report:
        from dlo_lib.grading.judge.report import GRADER_ERROR, Report

        try:
            return CourseJudges.of(course).judge(lab, path, self.unsafe)
        except Exception:  # noqa: BLE001  an error of the grader costs this row, not the others
            self.log.error(traceback.format_exc())
            return Report(lab.info.directory, GRADER_ERROR, {})


class ExecuteWithHidden(Execute):
    """nbgrader's execution, with the hidden checks and the lab's reduced sizes in the kernel's
    environment.
    """

    def preprocess(self, nb: NotebookNode, resources: dict, km: Any = None) -> tuple[NotebookNode, dict]:
        """Execute ``nb`` in a kernel with this process's environment and the lab's additions."""
        lab = _lab(resources)
        with environment({**lab.info.reduced, "DLO_HIDDEN": str(lab.folder)}):
            return super().preprocess(nb, resources, km)


def verdict_output(question: QuestionReport | None, maximum: float) -> NotebookNode:
    """Return the output of a test cell: the points from 0 to ``maximum`` as plain text, the checks as
    HTML.
    """
    if question is None:
        return new_output("execute_result", {"text/plain": "0.0"}, execution_count=1)
    from dlo_lib.grading.checks.verdict import table_html

    # nbgrader reads NaN and negative points as full marks, and raises for points above the maximum.
    points = min(max(question.points, 0.0), maximum) if math.isfinite(question.points) else 0.0
    heading = tr(
        "{question}: {points:g} of {maximum:g} points",
        question=question.question,
        points=points,
        maximum=maximum,
    )
    rows = [
        (check.status == "OK", tr(check.title), f"{check.points:g}/{check.maximum:g}", check.published)
        for check in question.checks
    ]
    data = {"text/plain": repr(points), "text/html": table_html(heading, rows, question.note)}
    return new_output("execute_result", data, execution_count=1)


def status_cell(report: Report) -> NotebookNode:
    """Return the first cell of a graded notebook: the status and the warnings."""
    lines = [
        tr("Status: **{status}**", status=report.status),
        *(f"- {_as_text(warning)}" for warning in report.warnings),
    ]
    return new_markdown_cell("\n".join(lines), id=STATUS_CELL)


def _as_text(text: str) -> str:
    """Escape ``text`` for Markdown, so that a name chosen by a student is no heading, link or script."""
    return re.sub(r"([\\`*_{}\[\]()#~|$!:])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _lab(resources: dict) -> LabSource:
    folder = source_folder(find_lab(resources["nbgrader"]["assignment"], source_labs()))
    files = text_source(folder), given_folder(folder) / LAB_FILE
    return _read(folder, *(file.stat().st_mtime_ns for file in files))


@lru_cache(maxsize=8)
def _read(folder: Path, *modified: int) -> LabSource:
    return read_lab(folder)
