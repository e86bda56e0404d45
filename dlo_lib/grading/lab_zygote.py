"""The zygote of a lab: what it withholds, imports and places follows from the lab's source. Started without waiting, and without torch."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable

from dlo_lib.grading.host import Zygote
from dlo_lib.grading.isolation import Isolation
from dlo_lib.grading.source import CellKind, LabSource


def zygote_for(lab: LabSource, isolation: Isolation | None = None) -> Zygote:
    """A process that starts the workers of ``lab``: what it teaches withheld, what its given cells import loaded.

    ``isolation``: what keeps them from the rest of the machine; by default what this host has, or nothing. A command that grades asks for
    ``isolation.required_isolation()`` first.
    """
    given = [cell.source for cell in lab.cells if cell.kind is CellKind.GIVEN]
    files = {path.relative_to(lab.folder).as_posix(): path for pattern in lab.info.release for path in lab.folder.glob(pattern)}
    files = {name: path for name, path in files.items() if path.is_file()}
    return Zygote(lab.info.taught, _imported(given), lab.info.reduced, files, isolation)


def _imported(sources: Iterable[str]) -> list[str]:
    """Modules that these cells import."""
    names: dict[str, None] = {}
    for source in sources:
        with contextlib.suppress(SyntaxError):  # a cell with magics
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Import):
                    names |= dict.fromkeys(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names[node.module] = None
    return list(names)
