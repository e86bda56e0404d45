"""The modules that cells import, by their text."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable

LINE_OF_IPYTHON = re.compile(r"^ *[%!?].*$|^.*\?$", re.MULTILINE)  # a magic, a command, or a question


def imported_modules(sources: Iterable[str]) -> list[str]:
    """Return the modules that these cells import, also in functions, in order. ``from a import b`` names both
    a and a.b, of which the second may be no module.
    """
    names: dict[str, None] = {}
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            source = LINE_OF_IPYTHON.sub("", source)
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Import):
                    names |= dict.fromkeys(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    names[node.module] = None
                    names |= dict.fromkeys(f"{node.module}.{alias.name}" for alias in node.names)
    return list(names)
