"""Names whose cell was run last with a syntax error: Python still has their earlier definition, and a check
judges that one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from dlo_lib.text import tr

DEFINED = re.compile(r"^(?:(?:async )?def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=(?!=)", re.MULTILINE)


class FailedCells:
    """The names defined by cells that could not be read when they were run last."""

    def __init__(self) -> None:
        self._failed: dict[str, str] = {}

    def record(self, result: Any) -> None:
        """Note a cell that has run; ``result`` is an ``ExecutionResult`` of IPython."""
        names = [one or other for one, other in DEFINED.findall(str(result.info.raw_cell))]
        error = result.error_before_exec
        for name in names:
            self._failed.pop(name, None)
            if isinstance(error, SyntaxError):
                self._failed[name] = tr("{kind} in line {line}", kind=type(error).__name__, line=error.lineno)

    def explain(self, used: Iterable[str]) -> str:
        """Return a sentence on the first of the names ``used`` whose cell failed; empty if there is none."""
        for name in used:
            if name in self._failed:
                return tr(
                    "The cell of `{name}` was not run: {error}. This verdict is about its earlier "
                    "definition, if it has one. Correct that cell, run it, then run this one.",
                    name=name, error=self._failed[name],
                )  # fmt: skip
        return ""


@cache
def failed_cells() -> FailedCells:
    """Return the record of this kernel; outside IPython it stays empty."""
    cells = FailedCells()
    ipython = sys.modules.get("IPython")
    running = ipython.get_ipython() if ipython is not None else None
    if running is not None:
        running.events.register("post_run_cell", cells.record)
    return cells
