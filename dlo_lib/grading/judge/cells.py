"""Match the cells of a notebook with those of its source. This module executes no cell and accepts any list.

Order, given cells, test cells, points and metadata come from the source. The answers come from the student,
matched by ``grade_id``, otherwise by the cell's id, otherwise by the names they define. Cells that the
student added keep their place behind the cell above them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.judge.given_functions import defined_again
from dlo_lib.grading.lab.names import defined_names
from dlo_lib.grading.lab.source import Cell, CellKind, LabSource
from dlo_lib.grading.lab.syntax import parsed

MAX_CELLS = 5_000
MAX_OWN = 1 << 20  # characters of all cells that a student added; all answers have twice as many
RUN_TEXT = ("exec", "marshal", "CodeType", "FunctionType", "run_cell")  # or modules


class Origin(Enum):
    """The author of a cell's text."""

    GIVEN = "given"  # from the source, as it is released
    SOLUTION = "solution"  # from the source, in place of the student's answer to another question
    ANSWER = "answer"  # the student, in a solution cell
    EXTRA = "extra"  # the student, in an added cell


@dataclass(frozen=True)
class SubmissionCell:
    """A cell to run.

    Args:
        id: the id of the source's cell, or ``extra-N``.
        origin: the author of the text.
        source: the text.
        behind: of an added cell, the id of the source's cell above it; None at the top.
    """

    id: str
    origin: Origin
    source: str
    behind: str | None = None


@dataclass(frozen=True)
class Submission:
    """The cells of a submission, rebuilt in the order of the source.

    Args:
        cells: the cells to run, in order.
        attempted: the questions whose answer the student changed.
        references: the questions answered with ``lab.use_reference``.
        warnings: what was unusual in the notebook.
    """

    cells: tuple[SubmissionCell, ...]
    attempted: frozenset[str]
    references: frozenset[str]
    warnings: tuple[str, ...]


def cell_was_missing(cell: str) -> str:
    """Return the warning that the source's ``cell`` is not in the submission."""
    return tr("cell `{cell}` was missing", cell=cell)


def rebuild_submission(notebook: Mapping[str, Any], lab: LabSource) -> Submission:
    """Return the submission in ``notebook``, rebuilt from the source of ``lab``."""
    cells = [
        cell
        for cell in notebook["cells"]
        if type(cell) is dict and (cell.get("source") or as_dict(cell.get("metadata")))
    ]
    return _CellMatcher(lab).match_cells(cells[:MAX_CELLS])


class _CellMatcher:
    """Matches the cells of one notebook with those of its source."""

    def __init__(self, lab: LabSource) -> None:
        self.lab = lab
        self.source: dict[str, Cell] = {cell.id: cell for cell in lab.cells}
        self.answers: dict[str, list[str]] = {}
        self.extras: dict[str | None, list[SubmissionCell]] = {}
        self.own = {Origin.ANSWER: 0, Origin.EXTRA: 0}
        self.seen: set[str] = set()
        self.warnings: list[str] = []

    def match_cells(self, cells: list[Any]) -> Submission:
        last: str | None = None
        for number, cell in enumerate(cells):
            if cell.get("cell_type") not in ("code", "markdown", "raw"):
                continue
            text = _text(cell.get("source"))
            identity = self._identity(cell, text)
            if identity is None:
                if cell["cell_type"] == "code" and text.strip():
                    self._add(SubmissionCell(f"extra-{number}", Origin.EXTRA, text, last))
                continue
            last = identity
            self._match(self.source[identity], cell, text)
        for cell in self.lab.cells:
            if cell.kind is CellKind.TEST and cell.id not in self.seen:
                self.warnings.append(
                    tr("TAMPER(test cell `{cell}` was missing): the source's is used", cell=cell.id)
                )
            if cell.kind is CellKind.SOLUTION and cell.id not in self.seen:
                self.warnings.append(cell_was_missing(cell.id))
        attempted = {
            name
            for name in self.answers
            if _plain(self._answer(self.source[name])) != _plain(self.source[name].released)
        }
        merged = {
            cell.id
            for cell in self.lab.cells
            if cell.kind is CellKind.SOLUTION and cell.id not in self.seen
            if any(_defines(self._answer(self.source[name]), _defined(cell.released)) for name in attempted)
        }
        for question in merged:
            self.answers[question] = []  # its stub would replace the definition in the merged cell
        attempted |= merged | self._answered_elsewhere()
        in_order = list(self._in_order())
        cells_in_order = (*in_order, *self._given_again(in_order))
        own = [cell.source for cell in cells_in_order if cell.origin is not Origin.GIVEN]
        text = "cell `{cell}` runs code from text ({names}): `dlo similar` cannot compare that code"
        for cell in cells_in_order:
            if cell.origin is not Origin.GIVEN and (names := _runs_text(cell.source)):
                self.warnings.append(tr(text, cell=cell.id, names=", ".join(names)))
        references = frozenset(name for text in own for name in _references(text)) & set(self.lab.questions)
        return Submission(
            cells_in_order, frozenset(attempted), references, tuple(dict.fromkeys(self.warnings))
        )

    def _add(self, cell: SubmissionCell) -> None:
        if self._fits(cell.source, Origin.EXTRA):
            self.extras.setdefault(cell.behind, []).append(cell)

    def _fits(self, text: str, origin: Origin) -> bool:
        """Return True if ``text`` is within the limit of its origin; otherwise add a warning."""
        self.own[origin] += len(text)
        most, whose = MAX_OWN, tr("cells that you added")
        if origin is Origin.ANSWER:
            most, whose = 2 * MAX_OWN, tr("your answers")
        if self.own[origin] > most:
            message = "{whose} hold more than {size} MB of code: the rest was left out"
            self.warnings.append(tr(message, whose=whose, size=most >> 20))
        return self.own[origin] <= most

    def _answer(self, cell: Cell) -> str:
        return "\n\n".join(self.answers.get(cell.id, [cell.released]))

    def _identity(self, cell: Mapping[str, Any], text: str) -> str | None:
        grading = as_dict(as_dict(cell.get("metadata")).get("nbgrader"))
        for name in (grading.get("grade_id"), cell.get("id")):
            if type(name) is str and name in self.source:
                return name
        if cell["cell_type"] != "code" or not text.strip() or self.own[Origin.EXTRA] + len(text) > MAX_OWN:
            return None
        plain = _plain(text)
        for known in self.lab.cells:
            if known.id in self.seen or known.kind is CellKind.TEXT:
                continue
            if _plain(known.released) == plain:
                return known.id
            if known.kind is CellKind.SOLUTION and _defines(text, _defined(known.released)):
                self.warnings.append(
                    tr(
                        "cell `{cell}` was found by the names it defines: its metadata was lost",
                        cell=known.id,
                    )
                )
                return known.id
        return None

    def _match(self, known: Cell, cell: Mapping[str, Any], text: str) -> None:
        again = known.id in self.seen
        self.seen.add(known.id)
        if known.kind is CellKind.SOLUTION:
            if again:
                self.warnings.append(tr("cell `{cell}` appears twice: both are run, in order", cell=known.id))
            if self._fits(text, Origin.ANSWER):
                self.answers.setdefault(known.id, []).append(text)
        elif known.kind is CellKind.TEST:
            grading = as_dict(as_dict(cell.get("metadata")).get("nbgrader"))
            honest = (
                grading.get("grade") is True
                and grading.get("points") == known.points
                and _plain(text) == _plain(known.source)
            )
            if again or not honest:
                self.warnings.append(
                    tr(
                        "TAMPER(test cell `{cell}` was changed or copied): the source's is used",
                        cell=known.id,
                    )
                )
        elif known.kind is CellKind.GIVEN and _plain(text) != _plain(known.source):
            self.warnings.append(tr("given cell `{cell}` was edited: the source's is used", cell=known.id))

    def _answered_elsewhere(self) -> set[str]:
        """Return the questions whose names an added cell defines or fills: as in the notebook, the later
        definition counts.
        """
        solutions = {
            cell.id: _defined(cell.released) for cell in self.lab.cells if cell.kind is CellKind.SOLUTION
        }
        every = frozenset().union(*solutions.values())
        given: set[str] = set()
        for text in (cell.source for cells in self.extras.values() for cell in cells):
            if any(name in text for name in every):
                given |= _defined(text) | _filled(text)
        return {question for question, names in solutions.items() if not names.isdisjoint(given)}

    def _in_order(self) -> Iterator[SubmissionCell]:
        yield from self.extras.get(None, [])
        for cell in self.lab.cells:
            if cell.kind is CellKind.GIVEN:
                yield SubmissionCell(cell.id, Origin.GIVEN, cell.source)
            elif cell.kind is CellKind.SOLUTION:
                yield SubmissionCell(cell.id, Origin.ANSWER, self._answer(cell))
            yield from self.extras.get(cell.id, [])

    def _given_again(self, cells: list[SubmissionCell]) -> Iterator[SubmissionCell]:
        """Yield the given functions that checks call and a cell of the student defines too: the last
        definition is the source's."""
        own = [cell.source for cell in cells if cell.origin is not Origin.GIVEN]
        for identity, (text, names) in defined_again(self.lab, own).items():
            message = "{names} of given cell `{cell}` is defined again: the checks call the source's"
            self.warnings.append(tr(message, names=", ".join(names), cell=identity))
            yield SubmissionCell(identity, Origin.GIVEN, text)


def _references(text: str) -> set[str]:
    """Return the questions for which the text calls ``lab.use_reference``."""
    if "use_reference" not in text:
        return set()
    calls = [
        node
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    used = [call.args[0] for call in calls if call.func.attr == "use_reference" and call.args]  # type: ignore[attr-defined]
    return {
        argument.value
        for argument in used
        if isinstance(argument, ast.Constant) and type(argument.value) is str
    }


def _defines(text: str, names: frozenset[str]) -> bool:
    """Return True if the text defines one of ``names`` at its top level. Only a text that contains one is
    parsed.
    """
    return any(name in text for name in names) and not names.isdisjoint(_defined(text))


@lru_cache(maxsize=256)
def _defined(text: str) -> frozenset[str]:
    """Return the names that the text defines at its top level."""
    names = defined_names(parsed(text))
    return frozenset(names or re.findall(r"^(?:def|class)\s+(\w+)", text, re.MULTILINE))


def _filled(text: str) -> frozenset[str]:
    """Return the names whose items the text sets, as in ``quiz["q1"] = "a"`` or ``quiz.update(q1="a")``."""
    changed: list[ast.expr] = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed += [node.func.value] * (node.func.attr == "update")
    return frozenset(node.id for node in changed if isinstance(node, ast.Name))


def _runs_text(text: str) -> list[str]:
    """Return the functions with which the text could run code that is not in it, such as ``exec``."""
    if not any(name in text for name in RUN_TEXT):
        return []
    found = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return [name for name in RUN_TEXT if name in found]


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _text(source: object) -> str:
    parts = source if type(source) is list else [source]
    return replace_surrogates("".join(part for part in parts if type(part) is str))


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON and file names can contain but UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def as_dict(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a dict, otherwise an empty dict."""
    return value if type(value) is dict else {}
