"""Names whose cell failed when it was run last: Python still has their earlier definition, and a check judges
that one.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from dlo_lib.base.text import tr

DEFINED = re.compile(r"^(?:(?:async )?def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=(?!=)", re.MULTILINE)


class FailedCells:
    """The names that a failed cell was to define. ``namespace``: the ``globals()`` of the notebook."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._before: dict[str, Any] = {}
        self._failed: dict[str, str] = {}

    def begin(self, info: Any) -> None:
        """Note the objects that the cell may replace; ``info`` is an ``ExecutionInfo`` of IPython."""
        names = (one or other for one, other in DEFINED.findall(str(info.raw_cell)))
        self._before = {name: self._namespace.get(name) for name in names}

    def end(self, result: Any) -> None:
        """Note the names that the cell has not replaced; ``result`` is an ``ExecutionResult`` of IPython."""
        error = result.error_before_exec or result.error_in_exec
        for name, earlier in self._before.items():
            self._failed.pop(name, None)
            if error is not None and self._namespace.get(name) is earlier:
                self._failed[name] = self._place(error)
        self._before = {}

    def explain(self, used: Iterable[str]) -> str:
        """Return a sentence on the first of the names ``used`` whose cell failed; empty if there is none."""
        for name in used:
            if name in self._failed:
                return tr(
                    "The last run of the cell of `{name}` ended with {error}. This verdict is about its "
                    "earlier definition, if it has one. Correct that cell, run it, then run this one.",
                    name=name, error=self._failed[name],
                )  # fmt: skip
        return ""

    def _place(self, error: BaseException) -> str:
        line = error.lineno if isinstance(error, SyntaxError) else None
        for frame, number in traceback.walk_tb(error.__traceback__):
            line = number if frame.f_globals is self._namespace else line
        kind = type(error).__name__
        return kind if line is None else tr("{kind} in line {line}", kind=kind, line=line)


@cache
def failed_cells() -> FailedCells:
    """Return the record of this kernel; outside IPython it stays empty."""
    ipython = sys.modules.get("IPython")
    running = ipython.get_ipython() if ipython is not None else None
    if running is None:
        return FailedCells({})
    cells = FailedCells(running.user_ns)
    running.events.register("pre_run_cell", cells.begin)
    running.events.register("post_run_cell", cells.end)
    return cells
