"""Grading inside nbgrader's own pipeline: the submitted notebook is never executed here, its test cells get the judge's verdicts.

``SubmissionExporter`` reads any file a student can hand in and rebuilds the notebook from the release, with the student's answers put in:
edited test cells, lost cells and broken metadata are then no cases any more. ``JudgeCells`` stands where nbgrader executes a notebook; it
gives each test cell one output, the points as nbgrader reads partial credit, so that gradebook, feedback, late penalties and formgrader
keep working. nbgrader gives full marks to a test cell without output: so every test cell gets one, whatever happens.

A batch brings its reports with it (:func:`reports`); ``nbgrader autograde`` and formgrader's button ask a judging service of their own,
which their process keeps.
"""

from __future__ import annotations

import atexit
import html
import math
import re
import tempfile
import traceback
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

from dlo_lib.errors import UserError
from dlo_lib.grading.course import LAB_FILE, find_lab, source_labs
from dlo_lib.grading.environ import environment
from dlo_lib.grading.judging import LOG_FILE as LOG_FILE
from dlo_lib.grading.judging import SECRET_FILE as SECRET_FILE
from dlo_lib.grading.judging import Job, JudgingService, read_secret
from dlo_lib.grading.lock import only_grader
from dlo_lib.grading.source import TEST_PREFIX, LabSource, read_lab, source_folder, text_source
from dlo_lib.text import tr

if TYPE_CHECKING:
    from nbgrader.coursedir import CourseDirectory

    from dlo_lib.grading.report import QuestionReport, Report

STATUS_CELL = "dlo-status"

# nbgrader makes a new preprocessor for each notebook: this is how a batch hands its reports to them.
_reports: ContextVar[Mapping[str, Report]] = ContextVar("reports")
_services: dict[Path, tuple[str, JudgingService]] = {}


@contextmanager
def reports(of: Mapping[str, Report]) -> Iterator[None]:
    """Meanwhile the report of a student is the one in ``of``, and nobody is judged."""
    token = _reports.set(of)
    try:
        yield
    finally:
        _reports.reset(token)


class SubmissionExporter(NotebookExporter):
    """nbconvert's notebook exporter for submissions: whatever the file holds, what comes out is the release with the student's answers."""

    def __init__(self, **settings: Any) -> None:
        """Refuse before the first submission rather than at each: nbgrader shows one line then, and no trace."""
        super().__init__(**settings)
        converter: Any = self.parent
        if not JudgeCells(parent=self).unsafe:
            from dlo_lib.grading.isolation import required_isolation  # here: as below, and few commands grade

            with self._refusing():
                required_isolation()
        # nbgrader makes an exporter at the start of a run and tells it nothing of the end: the run itself is to hold the lock.
        converter.convert_notebooks = partial(self._alone, converter.convert_notebooks, converter.coursedir)

    def _alone(self, convert: Callable[[], None], course: CourseDirectory) -> None:
        with ExitStack() as held:
            with self._refusing():
                held.enter_context(only_grader(Path(course.root) / "grades" / course.assignment_id))
            convert()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.log.error(str(error))
            raise NbGraderException(str(error)) from None

    def from_filename(self, filename: str, resources: Any = None, **kw: Any) -> tuple[Any, dict[str, Any]]:
        """Run the preprocessors on what is rebuilt from the file; a batch, and nbgrader's first pass, have done that already."""
        from dlo_lib.grading.rebuild import rebuild  # here: every nbgrader command loads this module, few of them grade

        path = Path(filename)
        ready = not getattr(self.parent, "_sanitizing", True) or resources["nbgrader"]["student"] in _reports.get({})
        rebuilt = nbformat.read(path, as_version=4) if ready else rebuild(_lab(resources), path)
        return self.from_notebook_node(rebuilt, resources, **kw)


class JudgeCells(NbGraderPreprocessor):
    """Ask the judge for the report of the submission, and put each question's verdict under its test cell."""

    unsafe = Bool(False, help="Judge without a sandbox where the host has none; every status is then marked UNSANDBOXED.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Judge the file that the student handed in, not ``nb``, which was rebuilt from it."""
        from dlo_lib.grading.report import for_the_student

        told, lab, course = resources["nbgrader"], _lab(resources), self.parent.parent.coursedir
        known = _reports.get({}).get(told["student"])
        handed_in = Path(course.format_path(course.submitted_directory, told["student"], told["assignment"]))
        report = known or self._report(lab, handed_in / lab.info.notebook, Path(course.root))
        for cell in filter(is_grade, nb.cells):
            question = report.questions.get(cell.metadata.nbgrader.grade_id.removeprefix(TEST_PREFIX))
            cell.outputs = [verdict_output(question, float(cell.metadata.nbgrader.points))]
        # What feedback pages are made of, whoever asked for the grading.
        nb.metadata.dlo = {"lab": lab.info.directory, "status": report.status, "report": for_the_student(report)}
        nb.cells = [status_cell(report), *nb.cells]
        return nb, resources

    def _report(self, lab: LabSource, path: Path, course: Path) -> Report:
        from dlo_lib.grading.report import GRADER_ERROR, Report

        try:
            return judged(lab, path, course, self.unsafe)
        except Exception:  # noqa: BLE001  a fault of ours costs this submission its row, gives it no points, and stops nobody else's
            self.log.error(traceback.format_exc())
            return Report(lab.info.directory, GRADER_ERROR, {})


def judged(lab: LabSource, notebook: Path, course: Path, unsafe: bool) -> Report:
    """The report of one submission, from the judging service that this process keeps for ``lab``.

    Raises:
        UserError: no sandbox, or the reference solution does not score full marks.
    """
    from dlo_lib.grading.isolation import required_isolation
    from dlo_lib.grading.report import GRADER_ERROR, Report
    from dlo_lib.grading.stored import lab_key, load

    if not unsafe:
        required_isolation()
    key = lab_key(lab, read_secret(course), str(unsafe))
    known = _services.get(lab.folder)
    if known is None or known[0] != key or not known[1].alive:
        if known is not None:
            known[1].close()
        _services[lab.folder] = (key, JudgingService(lab.info, course, unsafe))
        atexit.register(_services[lab.folder][1].close)
    with tempfile.TemporaryDirectory(prefix="dlo-report-") as folder:
        job = Job("", notebook, Path(folder) / "report.json", key)
        list(_services[lab.folder][1].judged([job], 1))
        stored = load(job.report)
    return stored.report if stored is not None else Report(lab.info.directory, GRADER_ERROR, {})


class ExecuteWithHidden(Execute):
    """nbgrader's own execution, with the hidden checks and the lab's reduced sizes in the kernel's environment."""

    def preprocess(self, nb: NotebookNode, resources: dict, km: Any = None) -> tuple[NotebookNode, dict]:
        """Execute ``nb`` in a kernel of this process's environment and what the lab adds to it."""
        lab = _lab(resources)
        with environment({**lab.info.reduced, "DLO_HIDDEN": str(lab.folder)}):
            return super().preprocess(nb, resources, km)


def verdict_output(question: QuestionReport | None, maximum: float) -> NotebookNode:
    """The output of a test cell: its plain text is the points, from 0 to ``maximum``; for people, the table of checks."""
    if question is None:
        return new_output("execute_result", {"text/plain": "0.0"}, execution_count=1)
    from dlo_lib.grading.verdict import table_html

    # nbgrader reads NaN and what is negative as full marks, and dies of what is above the maximum.
    points = min(max(question.points, 0.0), maximum) if math.isfinite(question.points) else 0.0
    heading = tr("{question}: {points:g} of {maximum:g} points", question=question.question, points=points, maximum=maximum)
    rows = [(check.status == "OK", tr(check.title), f"{check.points:g}/{check.maximum:g}", check.published) for check in question.checks]
    data = {"text/plain": repr(points), "text/html": table_html(heading, rows, question.note)}
    return new_output("execute_result", data, execution_count=1)


def status_cell(report: Report) -> NotebookNode:
    """The first cell of a graded notebook: the judge's status word and warnings."""
    lines = [tr("Status: **{status}**", status=report.status), *(f"- {_as_text(warning)}" for warning in report.warnings)]
    return new_markdown_cell("\n".join(lines), id=STATUS_CELL)


def _as_text(text: str) -> str:
    """In Markdown, as it stands: a name that a student has chosen is no heading, link or script."""
    return re.sub(r"([\\`*_{}\[\]()#~|$!:])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _lab(resources: dict) -> LabSource:
    folder = source_folder(find_lab(resources["nbgrader"]["assignment"], source_labs()))
    return _read(folder, text_source(folder).stat().st_mtime_ns, (folder / LAB_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(folder: Path, *modified: int) -> LabSource:
    return read_lab(folder)
