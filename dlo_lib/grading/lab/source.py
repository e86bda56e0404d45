"""A lab's source: the lab as text, ``solutions/NN_name/NN_name.py``, and the notebook with solutions.

The text is jupytext's py:percent; each cell's header holds its nbgrader metadata, and solutions stand between
``### BEGIN SOLUTION`` and ``### END SOLUTION``. It is what is committed and reviewed. Every cell has a stable
id: a question's solution cell is called after the question, its test cell ``test_<question>``. The points of
a test cell are those of the checks of its question. Building is a pure function of the lab's files, so
building twice gives the same bytes. The cell with ``lab = Lab(globals())`` gets a line for students: grading
runs it as released. The code of a demo of more than twelve lines is folded in the notebook, where a click on
the three dots opens it, except with the tag ``read``. ``make course`` compares the output of a cell with the
tag ``nbval-check-output``, which students do not get (``tests/labs/quoted_outputs.py``)::

    # %% [markdown] id="why"
    # %% id="setup"
    # %% id="guess" tags=["prediction"]
    # %% id="loss-curve" tags=["demo"]
    # %% id="long-loop" tags=["demo", "read"]
    # %% id="quoted" tags=["demo", "nbval-check-output"]
    # %% nbgrader={"grade_id": "parameters", "solution": true}
    # %% nbgrader={"grade_id": "test_parameters", "grade": true}
"""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.grading.lab.clear_solutions import ClearLabSolutions
from dlo_lib.grading.lab.course import LAB_FILE, LabInfo, given_folder, read_course_lab
from dlo_lib.grading.lab.course import source_folder as source_folder
from dlo_lib.grading.lab.declared import declared_points

TEST_PREFIX = "test_"
DEMO_TAG = "demo"
READ_TAG = "read"  # of a demo whose code the text speaks of
FOLDED_FROM = 13  # lines of a demo
SETUP = "lab = Lab(globals())"
SETUP_NOTE = (
    "# Given: grading runs this cell as released. Do not edit it; put imports into your answer's cell."
)
PREDICTION_TAG = "prediction"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
IDENTITY = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what nbformat allows
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
NBGRADER_DEFAULTS = {"grade": False, "locked": False, "schema_version": 3, "solution": False, "task": False}


class CellKind(Enum):
    """What a cell is for."""

    TEXT = "text"  # markdown
    GIVEN = "given"  # code the exercises stand on; the judge runs it
    DEMO = "demo"  # shows or measures; the judge does not run it
    PREDICTION = "prediction"  # asks for numbers before a measurement; the judge does not run it
    SOLUTION = "solution"  # the student's answer to a question
    TEST = "test"  # the question's checks: one line, locked


@dataclass(frozen=True)
class Cell:
    """One cell: its text with the solution (``source``), as students get it (``released``), of a test cell
    its points, and whether a notebook shows it without its code at first (``folded``)."""

    id: str
    kind: CellKind
    source: str
    released: str
    points: float = 0.0
    folded: bool = False

    @property
    def question(self) -> str | None:
        """The question a solution or test cell belongs to."""
        if self.kind is CellKind.SOLUTION:
            return self.id
        return self.id.removeprefix(TEST_PREFIX) if self.kind is CellKind.TEST else None

    @property
    def answer(self) -> str:
        """The solution without the marks around it: what a student would write."""
        return "\n".join(line for line in self.source.splitlines() if BEGIN not in line and END not in line)


@dataclass(frozen=True)
class LabSource:
    """A lab as its instructor has it.

    Attributes:
        folder: ``solutions/NN_name``, with the text, hidden checks and mutants.
        given: ``labs/NN_name``, with ``lab.toml``, the visible checks, figures and modules.
        cells: in the notebook's order.
    """

    info: LabInfo
    folder: Path
    given: Path
    cells: tuple[Cell, ...]

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders with the lab's files; one in a student's installation."""
        return tuple(dict.fromkeys((self.folder, self.given)))

    @property
    def questions(self) -> tuple[str, ...]:
        """The graded questions, in order."""
        return tuple(cell.id.removeprefix(TEST_PREFIX) for cell in self.cells if cell.kind is CellKind.TEST)

    @property
    def points(self) -> float:
        """Points of the whole lab."""
        return sum(cell.points for cell in self.cells)

    def solution(self, question: str) -> Cell:
        """The solution cell of ``question``."""
        return self._cell(question, CellKind.SOLUTION)

    def test(self, question: str) -> Cell:
        """The test cell of ``question``."""
        return self._cell(TEST_PREFIX + question, CellKind.TEST)

    def _cell(self, identity: str, kind: CellKind) -> Cell:
        return next(cell for cell in self.cells if cell.id == identity and cell.kind is kind)


def text_source(folder: Path) -> Path:
    """The lab's text in ``folder``: it is called after the folder."""
    return folder / f"{folder.name}.py"


def read_lab(folder: str | Path) -> LabSource:
    """Read and validate the lab in ``folder`` (``solutions/NN_name``).

    Raises:
        UserError: the text or ``lab.toml`` is absent or breaks a rule of the layout; the
            cell and the cure are named.
    """
    folder = Path(folder).resolve()
    given = given_folder(folder)
    lab = LabSource(
        read_course_lab(given), folder, given, tuple(_cell(node) for node in source_notebook(folder).cells)
    )
    _check_questions(lab)
    return lab


def notebook_text(notebook: NotebookNode) -> str:
    """The bytes of a notebook as we write it everywhere: keys sorted, no outputs, one line end at the end."""
    return nbformat.writes(notebook, version=4) + "\n"


def source_notebook(folder: Path) -> NotebookNode:
    """The notebook with solutions, built in memory: stable ids, nbgrader schema 3, our kernel, no outputs.

    Raises:
        UserError: the text is absent, or a cell's header cannot be read.
    """
    try:
        content = text_source(folder).read_text(encoding="utf-8")
    except FileNotFoundError:
        name = text_source(folder).name
        raise UserError(f"no {name} in {folder}: a lab's text is called after its folder") from None
    return copy.deepcopy(_notebook(folder, content, tuple(declared_points(folder).items())))


@functools.lru_cache(maxsize=8)  # a release reads the text of its lab five times
def _notebook(folder: Path, content: str, worth: tuple[tuple[str, float], ...]) -> NotebookNode:
    text, points = text_source(folder), dict(worth)
    nodes = [_node(text, cell, points) for cell in jupytext.reads(content, fmt="py:percent").cells]
    twice = [identity for identity, count in Counter(node.id for node in nodes).items() if count > 1]
    if twice:  # nbformat would quietly give the second one a random id
        raise UserError(f"{text}: two cells have the id {twice[0]!r}: give each its own")
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}, "dlo": {"lab": folder.name}}
    notebook = nbformat.v4.new_notebook(cells=nodes, metadata=metadata)
    nbformat.validate(notebook)
    return notebook


def _node(text: Path, cell: NotebookNode, points: Mapping[str, float]) -> NotebookNode:
    """A cell as it is written: its id, and nbgrader's metadata with what was left unsaid filled in."""
    metadata = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
    where = (
        f"{text}: the cell that begins {cell.source.strip().splitlines()[0][:60]!r}"
        if cell.source.strip()
        else f"{text}: an empty cell"
    )
    if unknown := sorted(set(metadata) - {"id", "nbgrader", "tags"}):
        raise UserError(
            f"{where} has {unknown[0]!r} in its header: a header holds id, nbgrader and tags, as JSON"
        )
    grading = metadata.pop("nbgrader", None)
    identity = metadata.pop("id", None) or (grading or {}).get("grade_id")
    if not identity or not IDENTITY.fullmatch(identity):
        raise UserError(f'{where} needs an id of letters, digits, - and _: write # %% id="loss-curve"')
    if grading is not None:
        if unknown := sorted(set(grading) - {*NBGRADER_DEFAULTS, "grade_id"}):
            known = ", ".join(NBGRADER_DEFAULTS)
            raise UserError(
                f"{where} has {unknown[0]!r} in its nbgrader metadata: known are {known}, grade_id; "
                "checks have the points"
            )
        # A test cell is always locked: nbgrader then restores it from the release.
        metadata["nbgrader"] = {
            **NBGRADER_DEFAULTS,
            "locked": bool(grading.get("grade")),
            **grading,
            "grade_id": identity,
        }
        if grading.get("grade"):
            worth = points.get(identity.removeprefix(TEST_PREFIX), 0.0)
            metadata["nbgrader"]["points"] = int(worth) if worth == int(worth) else worth
    make = nbformat.v4.new_markdown_cell if cell.cell_type == "markdown" else nbformat.v4.new_code_cell
    source = cell.source
    if cell.cell_type == "code" and SETUP in source.splitlines():
        source = f"{SETUP_NOTE}\n{source}"
    if is_folded(cell.cell_type, metadata.get("tags", ()), source):
        metadata["jupyter"] = {"source_hidden": True}
    return make(source, id=identity, metadata=metadata)


def is_folded(cell_type: str, tags: Collection[str], source: str) -> bool:
    """Whether a notebook shows a cell without its code at first: a long demo, whose output is what counts."""
    shows_code = DEMO_TAG not in tags or READ_TAG in tags
    return cell_type == "code" and not shows_code and len(source.splitlines()) >= FOLDED_FROM


def kind_of(cell: Mapping[str, Any]) -> CellKind:
    """What a cell of a notebook, ours or a released one, is for: its metadata says."""
    grading = cell["metadata"].get("nbgrader", {})
    if cell["cell_type"] != "code":
        return CellKind.TEXT
    if grading.get("grade"):
        return CellKind.TEST
    if grading.get("solution"):
        return CellKind.SOLUTION
    tags = cell["metadata"].get("tags", ())
    if PREDICTION_TAG in tags:
        return CellKind.PREDICTION
    return CellKind.DEMO if DEMO_TAG in tags else CellKind.GIVEN


def _cell(node: NotebookNode) -> Cell:
    kind = kind_of(node)
    return Cell(
        node.id,
        kind,
        node.source,
        _released(node, kind),
        float(node.metadata.get("nbgrader", {}).get("points") or 0),
        bool(node.metadata.get("jupyter", {}).get("source_hidden")),
    )


def _released(node: NotebookNode, kind: CellKind) -> str:
    begins, ends = node.source.count(BEGIN), node.source.count(END)
    if begins != ends or (kind is CellKind.SOLUTION) != (begins > 0):
        raise UserError(
            f"cell {node.id!r} has {begins} {BEGIN!r} and {ends} {END!r}: "
            "only a solution cell has them, in pairs"
        )
    if kind is not CellKind.SOLUTION:
        return node.source
    copy = NotebookNode(node)
    ClearLabSolutions().preprocess_cell(copy, {"language": "python"}, 0)
    try:
        ast.parse(copy.source)
    except SyntaxError as error:
        raise UserError(
            f"as students get it, {node.id!r} is not Python: {error}; "
            "leave a docstring or code around the region"
        ) from error
    return copy.source


def _check_questions(lab: LabSource) -> None:
    text = text_source(lab.folder)
    seen: set[str] = set()
    for cell in lab.cells:
        seen.add(cell.id)
        if cell.kind is CellKind.TEST:
            _check_test(text, lab, cell, seen)
    untested = [
        cell.id for cell in lab.cells if cell.kind is CellKind.SOLUTION and TEST_PREFIX + cell.id not in seen
    ]
    if untested:
        raise UserError(
            f"{text}: solution cell {untested[0]!r} has no test cell: "
            f"add one called {TEST_PREFIX + untested[0]!r}"
        )
    for question, needed in lab.info.needs.items():
        for name in (question, *needed):
            if name not in lab.questions:
                raise unknown_name(f"question in {lab.given / LAB_FILE}", name, lab.questions)
        if late := [name for name in needed if lab.questions.index(name) >= lab.questions.index(question)]:
            raise UserError(
                f"{lab.given / LAB_FILE}: {question} needs {late[0]}, which does not come before it"
            )


def _check_test(text: Path, lab: LabSource, cell: Cell, seen: set[str]) -> None:
    solutions = [other.id for other in lab.cells if other.kind is CellKind.SOLUTION]
    question = cell.id.removeprefix(TEST_PREFIX)
    if question == cell.id:
        raise UserError(f"{text}: test cell {cell.id!r} must be called {TEST_PREFIX}<question>")
    if question not in solutions:
        raise unknown_name(f"question of test cell {cell.id} in {text.name}", question, solutions)
    if question not in seen:
        raise UserError(f"{text}: test cell {cell.id!r} comes before its solution cell: put it after")
    if not cell.points > 0:
        raise UserError(
            f"{text}: test cell {cell.id!r} has no points: "
            f"no check is for {question!r}, or its checks have none"
        )
    if cell.source.strip() != f'lab.check("{question}")':
        raise UserError(
            f'{text}: test cell {cell.id!r} must hold one line, lab.check("{question}"): '
            "the checks are in checks/"
        )
