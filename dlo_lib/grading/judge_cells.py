"""Grading inside nbgrader's own pipeline: the submitted notebook is never executed here, its test cells get the judge's verdicts.

``SubmissionExporter`` reads any file a student can hand in and rebuilds the notebook from the release, with the student's answers put in:
edited test cells, lost cells and broken metadata are then no cases any more. ``JudgeCells`` stands where nbgrader executes a notebook; it
gives each test cell one output, the points as nbgrader reads partial credit, so that gradebook, feedback, late penalties and formgrader
keep working. nbgrader gives full marks to a test cell without output: so every test cell gets one, whatever happens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.preprocessors import Execute, NbGraderPreprocessor
from nbgrader.utils import is_grade

from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.environ import environment
from dlo_lib.grading.rebuild import rebuild
from dlo_lib.grading.source import TEST_PREFIX, read_lab, source_folder

SECRET_FILE = "secret"


class SubmissionExporter(NotebookExporter):
    """nbconvert's notebook exporter for submissions: whatever the file holds, what comes out is the release with the student's answers."""

    def from_file(self, file_stream: Any, resources: Any = None, **kw: Any) -> tuple[Any, dict[str, Any]]:
        """Read a submission and run the preprocessors on what was rebuilt from it."""
        lab = find_lab(resources["nbgrader"]["assignment"], source_labs())
        return self.from_notebook_node(rebuild(lab, file_stream), resources, **kw)


class JudgeCells(NbGraderPreprocessor):
    """Ask the judge for the report of the submission, and put each question's verdict under its test cell."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Judge the file that the student handed in, not ``nb``, which was rebuilt from it."""
        from dlo_lib.grading.judge import judge_notebook  # here: every nbgrader command loads this module, few of them judge

        told = resources["nbgrader"]
        course = self.parent.parent.coursedir
        lab = read_lab(source_folder(find_lab(told["assignment"], source_labs())))
        submission = Path(course.format_path(course.submitted_directory, told["student"], told["assignment"])) / lab.info.notebook
        report = judge_notebook(submission, lab, (Path(course.root) / SECRET_FILE).read_text().strip())
        for cell in filter(is_grade, nb.cells):
            cell.outputs = [verdict_output(report.questions[cell.metadata.nbgrader.grade_id.removeprefix(TEST_PREFIX)])]
        nb.metadata.dlo = {"lab": lab.info.directory, "status": report.status}
        return nb, resources


def verdict_output(question) -> NotebookNode:
    points = min(max(float(question.points), 0.0), float(question.maximum))
    return new_output("execute_result", {"text/plain": repr(points), "text/html": f"<b>{points}</b>"}, execution_count=1)


class ExecuteWithHidden(Execute):
    """nbgrader's own execution, with the hidden checks and the lab's reduced sizes in the kernel's environment."""

    def preprocess(self, nb: NotebookNode, resources: dict, km: Any = None) -> tuple[NotebookNode, dict]:
        """Execute ``nb`` in a kernel of this process's environment and what the lab adds to it."""
        lab = find_lab(resources["nbgrader"]["assignment"], source_labs())
        with environment({**lab.reduced, "DLO_HIDDEN": str(source_folder(lab))}):
            return super().preprocess(nb, resources, km)
