"""Read the text of cells as Python, without running it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from functools import lru_cache

MAX_PARSED = 1 << 18  # characters of one text: its syntax tree takes a thousand times the memory
MAX_NAME = 100  # characters of a module's name: no package has a longer one
LINE_OF_IPYTHON = re.compile(r"^ *[%!?].*$|^.*\?$", re.MULTILINE)  # a magic, a command, or a question


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a text; an empty one if it is no Python, or is too long."""
    if len(text) > MAX_PARSED:
        return ast.Module([], [])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a text may have thousands of invalid escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def parsed_cell(source: str) -> ast.Module:
    """Return the syntax tree of a cell of a lab, without its magics.

    Raises:
        SyntaxError: the rest is no Python.
    """
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.parse(LINE_OF_IPYTHON.sub("", source))


def imported_modules(sources: Iterable[str]) -> list[str]:
    """Return the modules that these cells import, also in functions, in order. ``from a import b`` names both
    a and a.b, of which the second may be no module. A name with other letters than ASCII, or a very long one,
    is left out, and so are cells beyond ``MAX_PARSED`` characters.
    """
    names: dict[str, None] = {}
    left = MAX_PARSED
    for source in sources:
        if "import" in source and len(source) <= left:  # parsing takes 1 ms for each cell
            left -= len(source)
            names |= dict.fromkeys(_imports_of(source))
    return [name for name in names if name.isascii() and len(name) <= MAX_NAME]


@lru_cache(maxsize=512)
def _imports_of(source: str) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for node in ast.walk(parsed(LINE_OF_IPYTHON.sub("", source))):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names[node.module] = None
            names |= dict.fromkeys(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)
