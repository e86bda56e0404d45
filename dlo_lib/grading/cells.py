"""Cells of a notebook matched with those of its source. Nothing of it is executed here, and no list of cells can stop it.

Order, given cells, test cells, points and metadata are the source's. The student's are the answers, matched by ``grade_id`` (else by the
cell's id, else by the names they define), and the cells they added, behind the one they followed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from dlo_lib.grading.source import Cell, CellKind, LabSource
from dlo_lib.text import tr

MAX_CELLS = 5_000
MAX_OWN = 4 << 20  # characters of all cells that a student added, and as many of all answers
MAX_PARSED = 1 << 18  # of one text: a tree takes a thousand times the room


class Origin(Enum):
    """Whose text a cell is."""

    GIVEN = "given"  # the source's
    ANSWER = "answer"  # the student's, in a solution cell
    EXTRA = "extra"  # the student's, in a cell of their own


@dataclass(frozen=True)
class TakenCell:
    """A cell to run. ``id`` is the source's, or ``extra-N``; of the latter ``behind`` is the source's cell above it, None at the top."""

    id: str
    origin: Origin
    source: str
    behind: str | None = None


@dataclass(frozen=True)
class Submission:
    """The cells in order, the questions that were touched, those answered by the reference, and what was odd."""

    cells: tuple[TakenCell, ...]
    attempted: frozenset[str]
    references: frozenset[str]
    warnings: tuple[str, ...]


def take(notebook: Mapping[str, Any], lab: LabSource) -> Submission:
    """The submission that ``notebook`` is, rebuilt from the source of ``lab``."""
    cells = [cell for cell in notebook["cells"] if type(cell) is dict and (cell.get("source") or as_dict(cell.get("metadata")))]
    return _Rebuild(lab).take(cells[:MAX_CELLS])


class _Rebuild:
    """Matches the cells of one notebook with those of its source."""

    def __init__(self, lab: LabSource) -> None:
        self.lab = lab
        self.source: dict[str, Cell] = {cell.id: cell for cell in lab.cells}
        self.answers: dict[str, list[str]] = {}
        self.extras: dict[str | None, list[TakenCell]] = {}
        self.own = {Origin.ANSWER: 0, Origin.EXTRA: 0}
        self.seen: set[str] = set()
        self.warnings: list[str] = []

    def take(self, cells: list[Any]) -> Submission:
        last: str | None = None
        for number, cell in enumerate(cells):
            if cell.get("cell_type") not in ("code", "markdown", "raw"):
                continue
            text = _text(cell.get("source"))
            identity = self._identity(cell, text)
            if identity is None:
                if cell["cell_type"] == "code" and text.strip():
                    self._add(TakenCell(f"extra-{number}", Origin.EXTRA, text, last), last)
                continue
            last = identity
            self._match(self.source[identity], cell, text)
        for cell in self.lab.cells:
            if cell.kind is CellKind.TEST and cell.id not in self.seen:
                self.warnings.append(tr("TAMPER(test cell `{cell}` was missing): the source's is used", cell=cell.id))
            if cell.kind is CellKind.SOLUTION and cell.id not in self.seen:
                self.warnings.append(tr("cell `{cell}` was missing", cell=cell.id))
        attempted = {name for name in self.answers if _plain(self._answer(self.source[name])) != _plain(self.source[name].released)}
        merged = {
            cell.id
            for cell in self.lab.cells
            if cell.kind is CellKind.SOLUTION and cell.id not in self.seen
            if any(_defines(self._answer(self.source[name]), _defined(cell.released)) for name in attempted)
        }
        for question in merged:
            self.answers[question] = []  # its stub would undo what the cell it was merged with defines
        attempted |= merged | self._answered_elsewhere()
        cells_in_order = tuple(self._in_order())
        own = [cell.source for cell in cells_in_order if cell.origin is not Origin.GIVEN]
        references = frozenset(name for text in own for name in _references(text)) & set(self.lab.questions)
        return Submission(cells_in_order, frozenset(attempted), references, tuple(dict.fromkeys(self.warnings)))

    def _add(self, cell: TakenCell, behind: str | None) -> None:
        if self._room(cell.source, Origin.EXTRA):
            self.extras.setdefault(behind, []).append(cell)

    def _room(self, text: str, origin: Origin) -> bool:
        """Whether ``text`` can be taken too; else that is noted."""
        self.own[origin] += len(text)
        if self.own[origin] > MAX_OWN:
            whose = tr("your answers") if origin is Origin.ANSWER else tr("cells of your own")
            self.warnings.append(tr("{whose} hold more than 4 MB of code: the rest was left out", whose=whose))
        return self.own[origin] <= MAX_OWN

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
                self.warnings.append(tr("cell `{cell}` was found by the names it defines: its metadata was lost", cell=known.id))
                return known.id
        return None

    def _match(self, known: Cell, cell: Mapping[str, Any], text: str) -> None:
        again = known.id in self.seen
        self.seen.add(known.id)
        if known.kind is CellKind.SOLUTION:
            if again:
                self.warnings.append(tr("cell `{cell}` appears twice: both are run, in order", cell=known.id))
            if self._room(text, Origin.ANSWER):
                self.answers.setdefault(known.id, []).append(text)
        elif known.kind is CellKind.TEST:
            grading = as_dict(as_dict(cell.get("metadata")).get("nbgrader"))
            honest = grading.get("grade") is True and grading.get("points") == known.points and _plain(text) == _plain(known.source)
            if again or not honest:
                self.warnings.append(tr("TAMPER(test cell `{cell}` was changed or copied): the source's is used", cell=known.id))
        elif known.kind is CellKind.GIVEN and _plain(text) != _plain(known.source):
            self.warnings.append(tr("given cell `{cell}` was edited: the source's is used", cell=known.id))

    def _answered_elsewhere(self) -> set[str]:
        """Questions whose names a cell of the student's own defines: as in the notebook, the later definition counts."""
        solutions = {cell.id: _defined(cell.released) for cell in self.lab.cells if cell.kind is CellKind.SOLUTION}
        own = [cell.source for cells in self.extras.values() for cell in cells]
        return {question for question, names in solutions.items() if any(_defines(text, names) for text in own)}

    def _in_order(self) -> Iterator[TakenCell]:
        yield from self.extras.get(None, [])
        for cell in self.lab.cells:
            if cell.kind is CellKind.GIVEN:
                yield TakenCell(cell.id, Origin.GIVEN, cell.source)
            elif cell.kind is CellKind.SOLUTION:
                yield TakenCell(cell.id, Origin.ANSWER, self._answer(cell))
            yield from self.extras.get(cell.id, [])


def _references(text: str) -> set[str]:
    """Questions for which the text calls ``lab.use_reference``."""
    if "use_reference" not in text:
        return set()
    calls = [node for node in ast.walk(_parsed(text)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    used = [call.args[0] for call in calls if call.func.attr == "use_reference" and call.args]  # type: ignore[attr-defined]
    return {argument.value for argument in used if isinstance(argument, ast.Constant) and type(argument.value) is str}


def _defines(text: str, names: frozenset[str]) -> bool:
    """Whether the text defines one of ``names`` at its top level. Only a text that holds one is parsed."""
    return any(name in text for name in names) and not names.isdisjoint(_defined(text))


@lru_cache(maxsize=256)
def _defined(text: str) -> frozenset[str]:
    """Names that the text defines at its top level."""
    names: set[str] = set()
    for node in _parsed(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names or re.findall(r"^(?:def|class)\s+(\w+)", text, re.MULTILINE))


def _parsed(text: str) -> ast.Module:
    if len(text) > MAX_PARSED:
        return ast.Module([], [])
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _text(source: object) -> str:
    parts = source if type(source) is list else [source]
    return whole("".join(part for part in parts if type(part) is str))


def whole(text: str) -> str:
    """Without halves of characters, which JSON and file names can hold but no report could be written with."""
    return text.encode("utf-8", "replace").decode()


def as_dict(value: object) -> dict[str, Any]:
    """``value``, or an empty dict where it is none."""
    return value if type(value) is dict else {}
