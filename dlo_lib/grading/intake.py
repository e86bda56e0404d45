"""From whatever was handed in to the cells that are judged. Nothing of it is executed here, and no file can stop it.

The notebook is rebuilt from the source: order, given cells, test cells, points and metadata are the source's. The student's are the
answers, matched by ``grade_id`` (else by the cell's id, else by the names they define), and the cells they added, behind the one they
followed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any

from dlo_lib.grading.source import Cell, CellKind, LabSource
from dlo_lib.text import tr

MAX_BYTES = 100 << 20
MAX_CELLS = 5_000
MAX_FILES = 50  # that are looked at for a renamed notebook
SAVED_AS = (".ipynb", ".ipynb.txt", ".ipynb.json", ".json")


class Invalid(Exception):
    """It cannot be graded; the text tells the student why."""


class Origin(Enum):
    """Whose text a cell is."""

    GIVEN = "given"  # the source's
    ANSWER = "answer"  # the student's, in a solution cell
    EXTRA = "extra"  # the student's, in a cell of their own


@dataclass(frozen=True)
class TakenCell:
    """A cell to run. ``id`` is the source's, or ``extra-N``."""

    id: str
    origin: Origin
    source: str


@dataclass(frozen=True)
class Submission:
    """The cells in order, the questions that were touched, those answered by the reference, and what was odd."""

    cells: tuple[TakenCell, ...]
    attempted: frozenset[str]
    references: frozenset[str]
    warnings: tuple[str, ...]


def find_submission(path: Path, lab: str) -> tuple[Path, list[str]]:
    """The notebook at ``path``, or where that is none another that carries the id of ``lab``; with warnings.

    Raises:
        Invalid: there is none.
    """
    reason: Invalid | None = None
    if path.exists() or path.is_symlink():
        try:
            read_notebook(path)
            return path, []
        except Invalid as error:
            reason = error
    for other in notebooks_beside(path):
        try:
            if _lab_of(read_notebook(other)) == lab:
                return other, [_taken_for(other, path)]
        except Invalid:
            continue
    raise reason or Invalid(tr("there is no notebook {name} in what was handed in", name=path.name))


def notebooks_beside(path: Path) -> list[Path]:
    """Other files that may be the notebook ``path``: renamed, in a folder of its own, or saved as text by a browser or mail program.

    The first fifty, and no more than 100 MB of them.
    """
    found: list[Path] = []
    for folder, names, files in os.walk(path.parent):
        names[:] = sorted(name for name in names if not name.startswith("."))[:MAX_FILES]
        found += [Path(folder) / file for file in files if file.lower().endswith(SAVED_AS)]
        if len(found) > 100 * MAX_FILES:
            break
    found.sort(key=lambda file: (len(file.parts), file.suffix != ".ipynb", os.fsencode(file)))
    others = [file for file in found if file != path][:MAX_FILES]
    sizes = accumulate(file.lstat().st_size for file in others)
    return [file for file, size in zip(others, sizes) if size <= MAX_BYTES]


def open_notebook(path: Path, lab: LabSource) -> tuple[Submission, list[str]]:
    """The submission whose notebook should be ``path``, with warnings of how it was found.

    Where ``path`` is as it was released and a copy beside it has been worked in, that is the submission.

    Raises:
        Invalid: there is none that can be read.
    """
    found, warnings = find_submission(path, lab.info.directory)
    submission = take(read_notebook(found), lab)
    if submission.attempted:
        return submission, warnings
    for other in notebooks_beside(path):
        try:
            notebook = read_notebook(other)
        except Invalid:
            continue
        if _lab_of(notebook) == lab.info.directory and (copy := take(notebook, lab)).attempted:
            return copy, [_taken_for(other, path)]
    return submission, warnings


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook as it was parsed; only its outline has been looked at.

    Raises:
        Invalid: it is no notebook that can be read.
    """
    if path.is_symlink():
        raise Invalid("symlink")
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Invalid(tr("not a regular file"))
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Invalid(tr("not a regular file"))
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Invalid(tr("the file cannot be read: {reason}", reason=error.strerror)) from error
    if len(raw) > MAX_BYTES:
        raise Invalid(tr("larger than 100 MB: clear the outputs and hand it in again"))
    if not raw.strip():
        raise Invalid(tr("the file is empty: save the notebook and hand it in again"))
    try:
        notebook = json.loads(raw.decode(json.detect_encoding(raw)))  # UTF-8, or UTF-16 and UTF-32 as some editors save it
    except RecursionError:
        raise Invalid(tr("nested too deep to be a notebook")) from None
    except UnicodeDecodeError:
        raise Invalid(tr("not a text file in UTF-8: save the notebook in Jupyter and hand it in again")) from None
    except ValueError:
        raise Invalid(tr("damaged: not valid JSON; open it in Jupyter, save it and hand it in again")) from None
    if type(notebook) is dict and "worksheets" in notebook:
        raise Invalid(tr("notebook format 3: open it in Jupyter, save it and hand it in again"))
    if type(notebook) is not dict or type(notebook.get("cells")) is not list:
        raise Invalid(tr("not a notebook: it has no cells"))
    return notebook


def take(notebook: Mapping[str, Any], lab: LabSource) -> Submission:
    """The submission that ``notebook`` is, rebuilt from the source of ``lab``."""
    return _Rebuild(lab).take(notebook["cells"][:MAX_CELLS])


class _Rebuild:
    """Matches the cells of one notebook with those of its source."""

    def __init__(self, lab: LabSource) -> None:
        self.lab = lab
        self.source: dict[str, Cell] = {cell.id: cell for cell in lab.cells}
        self.answers: dict[str, str] = {}
        self.extras: dict[str | None, list[TakenCell]] = {}
        self.seen: set[str] = set()
        self.warnings: list[str] = []

    def take(self, cells: list[Any]) -> Submission:
        last: str | None = None
        for number, cell in enumerate(cells):
            if type(cell) is not dict or cell.get("cell_type") not in ("code", "markdown", "raw"):
                continue
            text = _text(cell.get("source"))
            identity = self._identity(cell, text)
            if identity is None:
                if cell["cell_type"] == "code" and text.strip():
                    self.extras.setdefault(last, []).append(TakenCell(f"extra-{number}", Origin.EXTRA, text))
                continue
            last = identity
            self._match(self.source[identity], cell, text)
        for cell in self.lab.cells:
            if cell.kind is CellKind.TEST and cell.id not in self.seen:
                self.warnings.append(tr("TAMPER(test cell `{cell}` was missing): the source's is used", cell=cell.id))
            if cell.kind is CellKind.SOLUTION and cell.id not in self.seen:
                self.warnings.append(tr("cell `{cell}` was missing", cell=cell.id))
        attempted = {question for question, text in self.answers.items() if _plain(text) != _plain(self.source[question].released)}
        cells_in_order = tuple(self._in_order())
        own = [cell.source for cell in cells_in_order if cell.origin is not Origin.GIVEN]
        references = frozenset(name for text in own for name in _references(text)) & set(self.lab.questions)
        return Submission(cells_in_order, frozenset(attempted), references, tuple(dict.fromkeys(self.warnings)))

    def _identity(self, cell: Mapping[str, Any], text: str) -> str | None:
        grading = _dict(_dict(cell.get("metadata")).get("nbgrader"))
        for name in (grading.get("grade_id"), cell.get("id")):
            if type(name) is str and name in self.source:
                return name
        if cell["cell_type"] != "code" or not text.strip():
            return None
        for known in self.lab.cells:
            if known.id in self.seen or known.kind is CellKind.TEXT:
                continue
            if _plain(known.released) == _plain(text):
                return known.id
            if known.kind is CellKind.SOLUTION and _defined(known.released) & _defined(text):
                self.warnings.append(tr("cell `{cell}` was found by the names it defines: its metadata was lost", cell=known.id))
                return known.id
        return None

    def _match(self, known: Cell, cell: Mapping[str, Any], text: str) -> None:
        again = known.id in self.seen
        self.seen.add(known.id)
        if known.kind is CellKind.SOLUTION:
            if again:
                self.warnings.append(tr("cell `{cell}` appears twice: both are run, in order", cell=known.id))
                text = f"{self.answers[known.id]}\n\n{text}"
            self.answers[known.id] = text
        elif known.kind is CellKind.TEST:
            grading = _dict(_dict(cell.get("metadata")).get("nbgrader"))
            honest = grading.get("grade") is True and grading.get("points") == known.points and _plain(text) == _plain(known.source)
            if again or not honest:
                self.warnings.append(tr("TAMPER(test cell `{cell}` was changed or copied): the source's is used", cell=known.id))
        elif known.kind is CellKind.GIVEN and _plain(text) != _plain(known.source):
            self.warnings.append(tr("given cell `{cell}` was edited: the source's is used", cell=known.id))

    def _in_order(self) -> Iterator[TakenCell]:
        yield from self.extras.get(None, [])
        for cell in self.lab.cells:
            if cell.kind is CellKind.GIVEN:
                yield TakenCell(cell.id, Origin.GIVEN, cell.source)
            elif cell.kind is CellKind.SOLUTION:
                yield TakenCell(cell.id, Origin.ANSWER, self.answers.get(cell.id, cell.released))
            yield from self.extras.get(cell.id, [])


def _lab_of(notebook: Mapping[str, Any]) -> object:
    """The id of the lab that the notebook was made for."""
    return _dict(_dict(notebook.get("metadata")).get("dlo")).get("lab")


def _taken_for(found: Path, path: Path) -> str:
    return tr("{name} was taken for {expected}: keep the notebook's name", name=_whole(found.name)[:80], expected=path.name)


def _references(text: str) -> set[str]:
    """Questions for which the text calls ``lab.use_reference``."""
    calls = [node for node in ast.walk(_parsed(text)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    used = [call.args[0] for call in calls if call.func.attr == "use_reference" and call.args]  # type: ignore[attr-defined]
    return {argument.value for argument in used if isinstance(argument, ast.Constant) and type(argument.value) is str}


def _defined(text: str) -> set[str]:
    """Names that the text defines at its top level."""
    names: set[str] = set()
    for node in _parsed(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names or set(re.findall(r"^(?:def|class)\s+(\w+)", text, re.MULTILINE))


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _text(source: object) -> str:
    parts = source if type(source) is list else [source]
    return _whole("".join(part for part in parts if type(part) is str))


def _whole(text: str) -> str:
    """Without halves of characters, which JSON and file names can hold but no report could be written with."""
    return text.encode("utf-8", "replace").decode()


def _dict(value: object) -> dict[str, Any]:
    return value if type(value) is dict else {}
