"""The functions of given cells that checks call: they are the course's, whatever another cell defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from dlo_lib.grading.lab.declared import CHECKS_FOLDER
from dlo_lib.grading.lab.names import defined_names
from dlo_lib.grading.lab.source import CellKind, LabSource
from dlo_lib.grading.lab.syntax import parsed

CALLED = re.compile(r"\bstudent\.([A-Za-z]\w*)")


def defined_again(lab: LabSource, own: Iterable[str]) -> dict[str, tuple[str, list[str]]]:
    """Return which given functions and classes the student's cells bind too, although a check calls them: by
    given cell, their text in the source, and their names.

    Args:
        own: the texts of the student's cells.
    """
    texts = list(own)
    called = _called(lab.given / CHECKS_FOLDER)
    called -= {name for cell in lab.cells if cell.kind is CellKind.SOLUTION for name in _names(cell.source)}
    found = {}
    for cell in lab.cells:
        given = _definitions(cell.source) if cell.kind is CellKind.GIVEN else {}
        wanted = [name for name in given if name in called]
        again = [name for name in wanted if any(name in text and name in _bound(text) for text in texts)]
        if again:
            found[cell.id] = "\n\n\n".join(given[name] for name in again), again
    return found


def _called(folder: Path) -> set[str]:
    """Return the names that the checks and scenarios in ``folder`` call in the student's work."""
    return {name for path in sorted(folder.glob("*.py")) for name in CALLED.findall(_text(path))}


@lru_cache(maxsize=64)
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _names(text: str) -> list[str]:
    return defined_names(parsed(text))


@lru_cache(maxsize=64)
def _bound(text: str) -> frozenset[str]:
    """Return the names that a text may bind, also as ``globals()["name"]``."""
    found: set[str] = set()
    for node in ast.walk(parsed(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return frozenset(found)


def _definitions(text: str) -> Mapping[str, str]:
    """Return the functions and classes of a text by name, each with its decorators."""
    lines, found = text.splitlines(), {}
    for node in parsed(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found
