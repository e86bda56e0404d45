"""Mutants: wrong solutions, each a small patch of the reference solution, that prove
what a lab's checks catch.

``mutants.py`` of a lab lists them. A mutant has a title that says what is wrong, the check that must fail,
words of the message that the student then reads, and the patch::

    from dlo_lib.grading.lab.mutants import Mutant

    MUTANTS = [
        Mutant(
            "The zeros come first, so that every piece is shifted",
            "check_flat_shards",
            says="the pieces of all ranks",
            replace={"(0, size * world - flat.numel())": "(size * world - flat.numel(), 0)"},
        ),
    ]

``replace`` maps exact text of one solution cell to new text. All old texts must occur exactly once in the
same cell, and only one cell may hold them all: its question is the question of the mutant. An old text of one
line may be any part of a line. A text of several lines is a block: it is dedented, and matches at any
indentation. The new text gets the indentation of the line in which the old text begins. An empty new text
removes the old one. A mutant that does something else altogether gives ``answer``: functions, classes or
values that take the place of those of the same names, and helpers; the rest of the cell stays. The points
that a mutant loses are those of its check.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.grading.lab.source import CellKind, LabSource

FILE = "mutants.py"
NAME_WORDS = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Planted:
    """A mutant in its place: the ``answer`` to ``question``, as a student would hand it in."""

    question: str
    answer: str


@dataclass(frozen=True)
class Mutant:
    """A wrong solution of one question. It must fail the check ``fails``, and no other check of the question
    except those of ``also``.

    Attributes:
        title: what is wrong, in words; unique in a lab.
        fails: name of the check that catches it.
        says: what the message of this check contains; several texts if the message depends on the release of
            PyTorch: it contains one of them.
        also: other checks that this mistake must fail, for example because it does nothing.
        replace: old text → new text in the reference solution of one question.
        answer: instead of ``replace``, new definitions of names that the reference
            solution of one question defines.
        question: the question, where the patch fits several solution cells.
    """

    title: str
    fails: str
    says: str | tuple[str, ...]
    replace: Mapping[str, str] = field(default_factory=dict)
    answer: str = ""
    question: str = ""
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The title as a name for reports and tests, such as ``the_zeros_come_first``."""
        return "_".join(NAME_WORDS.findall(self.title.lower()))

    def planted(self, lab: LabSource) -> Planted:
        """The mutant as an answer to its question: the reference solution of ``lab`` with the patch applied.

        Raises:
            UserError: an old text is absent, occurs twice or overlaps another; no cell or several cells
                fit; there are both or neither of ``replace`` and ``answer``; the result is not Python, or
                is the reference solution.
        """
        if bool(self.replace) == bool(self.answer):
            raise self._error("give either replace or answer")
        cells = {cell.id: cell.answer for cell in lab.cells if cell.kind is CellKind.SOLUTION}
        question = self._place(cells)
        try:
            patched = (self._redefined if self.answer else self._patched)(cells[question])
            same = ast.dump(ast.parse(patched)) == ast.dump(ast.parse(cells[question]))
        except SyntaxError as error:
            raise self._error(
                f"its answer to {question} is not Python: {error.msg}: {(error.text or '').strip()!r}"
            ) from error
        if same:
            raise self._error(f"its answer to {question} is the reference solution")
        return Planted(question, patched)

    def _place(self, cells: Mapping[str, str]) -> str:
        """The question: the one cell that holds all old texts, or defines all names of the answer."""
        if self.question:
            if self.question not in cells:
                raise unknown_name(f"question of the mutant {self.title!r}", self.question, cells)
            cells = {self.question: cells[self.question]}
        # A text or name, and the cells that have it.
        found = {old: {name for name, text in cells.items() if _places(old, text)} for old in self.replace}
        if self.answer:
            defined = {name: set(_definitions(text)) for name, text in cells.items()}
            found = {
                new: {name for name, names in defined.items() if new in names}
                for new in self._new_definitions()
            }
            found = {new: having for new, having in found.items() if having}  # the others are helpers
            if not found:
                raise self._error("its answer defines no name of a solution cell")
        where = self.question or "any solution cell"
        if absent := [what for what, having in found.items() if not having]:
            raise self._error(f"{absent[0]!r} is not in {where}")
        together = set.intersection(*found.values())
        if not together:
            raise self._error("no solution cell has all that is to be replaced: a mutant is of one question")
        if len(together) > 1:
            names = ", ".join(name for name in cells if name in together)
            raise self._error(f"it fits {names}: give more of the text to replace, or question=")
        return together.pop()

    def _new_definitions(self) -> dict[str, str]:
        try:
            return _definitions(_block(self.answer))
        except SyntaxError as error:
            raise self._error(
                f"its answer is not Python: {error.msg}: {(error.text or '').strip()!r}"
            ) from error

    def _redefined(self, text: str) -> str:
        """``text`` with the definitions of the answer instead of those that it has."""
        old, new = _definitions(text), self._new_definitions()
        for name in old.keys() & new.keys():
            text = text.replace(old[name], new[name])
        helpers = [new[name] for name in new if name not in old]
        return "\n\n\n".join([*helpers, text])

    def _patched(self, text: str) -> str:
        """``text`` with every replacement made. All are found in the unchanged text, so that none can change
        what another one finds."""
        spans = []
        for old, new in self.replace.items():
            places = _places(old, text)
            if len(places) > 1:
                raise self._error(f"{old!r} occurs {len(places)} times in the solution cell: give more of it")
            spans.append((*places[0], new))
        spans.sort()
        for (_, end, _), (start, _, _) in pairwise(spans):
            if start < end:
                raise self._error(f"two texts to replace overlap at {text[start:end]!r}: make them one")
        for start, end, new in reversed(spans):
            text = text[:start] + _indented(new, _indentation(text, start)) + text[end:]
        return text

    def _error(self, what: str) -> UserError:
        return UserError(f"mutant {self.title!r}: {what}")


def read_mutants(folder: Path) -> tuple[Mutant, ...]:
    """The mutants of the lab whose source is in ``folder``, in the order of its ``mutants.py``; none without
    that file. The file is run.

    Raises:
        UserError: it does not load, has no list ``MUTANTS`` of :class:`Mutant`, or two of
            its titles make one name.
    """
    file = folder / FILE
    if not file.is_file():
        return ()
    mutants = _loaded(file)
    if not isinstance(mutants, list) or not all(isinstance(mutant, Mutant) for mutant in mutants):
        raise UserError(f"{file}: MUTANTS must be a list of Mutant(...)")
    if twice := [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]:
        raise UserError(f"{file}: two mutants are called {twice[0]!r}: change one of the titles")
    return tuple(mutants)


def _loaded(file: Path) -> object:
    names: dict[str, object] = {"__name__": FILE, "__file__": str(file)}
    try:
        exec(compile(file.read_text(encoding="utf-8"), file, "exec"), names)
    except Exception as error:
        raise UserError(f"{file} does not load: {type(error).__name__}: {error}") from error
    return names.get("MUTANTS")


def _places(old: str, text: str) -> list[tuple[int, int]]:
    """Start and end of each occurrence of ``old``, as a block at any indentation
    where it has several lines."""
    wanted = _block(old)
    first = wanted.split("\n", 1)[0]
    if not first:
        return []
    places = []
    for found in re.finditer(re.escape(first), text):
        block = _indented(wanted, _indentation(text, found.start()))
        end = found.start() + len(block)
        whole_lines = "\n" not in block or text[end : end + 1] in ("", "\n")
        if whole_lines and text.startswith(block, found.start()):
            places.append((found.start(), end))
    return places


def _definitions(text: str) -> dict[str, str]:
    """Name → source of each function, class and value that ``text`` defines at its top level."""
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def _block(text: str) -> str:
    """A text of several lines without its common indentation, and without empty lines around
    it; one line as it is."""
    return textwrap.dedent(text).strip("\n").rstrip() if "\n" in text else text


def _indented(text: str, indentation: str) -> str:
    """``text`` as a block, all lines but the first with ``indentation``."""
    return _block(text).replace("\n", "\n" + indentation)


def _indentation(text: str, place: int) -> str:
    """The white space at the beginning of the line of ``place``."""
    line = text[text.rfind("\n", 0, place) + 1 :]
    return line[: len(line) - len(line.lstrip(" "))]


class Idle(Enum):
    """What the functions of an idle answer return."""

    NONE = "None"
    ARGUMENT = "their first argument"


def idle_answer(source: str, returns: Idle) -> str | None:
    """Return the cell with the same functions, which do nothing; None if the cell defines no function."""
    idle = _IdleFunctions(returns)
    tree = idle.visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree)) if idle.found else None


class _IdleFunctions(ast.NodeTransformer):
    """Replaces the body of each function by a return."""

    def __init__(self, returns: Idle) -> None:
        self.returns, self.found = returns, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.found = True
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        names = names[1:] if names[:1] == ["self"] else names
        nothing = self.returns is Idle.NONE or not names or node.name == "__init__"
        node.body = [ast.Return(None if nothing else ast.Name(names[0], ast.Load()))]
        return node


def with_bodies(source: str, returned: Callable[[str], str]) -> str:
    """Return the cell ``source`` with functions that only return an expression.

    ``returned``: the name of a function, or ``Class.method``, → the expression. ``__init__`` returns nothing,
    nor do kernels, which have a decorator ``jit``.
    """
    return ast.unparse(ast.fix_missing_locations(_Bodies(returned).visit(ast.parse(source))))


class _Bodies(ast.NodeTransformer):
    """Replaces the body of each function."""

    def __init__(self, returned: Callable[[str], str]) -> None:
        self.returned, self.inside = returned, ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        before, self.inside = self.inside, f"{self.inside}{node.name}."
        self.generic_visit(node)
        self.inside = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if node.name == "__init__" or kernel:
            node.body = ast.parse("pass").body
        else:
            node.body = [ast.Return(ast.parse(self.returned(self.inside + node.name), mode="eval").body)]
        return node
