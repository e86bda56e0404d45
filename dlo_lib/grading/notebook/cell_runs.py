"""Which text of each cell ran last, and when, so that a verdict can tell whether its cell has changed since.

JupyterLab sends the id of a cell with its text, and the id of a solution cell is its question. A front end
that sends no ids, or others, gives no answer here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CellRun:
    """The text that ran, and the time at which it began, in seconds since 1970."""

    text: str
    began: float

    @property
    def digest(self) -> str:
        """A short digest of the text."""
        return digest(self.text)


class CellRuns:
    """The last run of each cell of this kernel."""

    def __init__(self) -> None:
        self._runs: dict[str, CellRun] = {}
        self._after: dict[str, Callable[[CellRun], None]] = {}

    def begin(self, info: Any) -> None:
        """Note the cell that begins; ``info`` is an ``ExecutionInfo`` of IPython."""
        if cell := getattr(info, "cell_id", None):
            run = CellRun(str(info.raw_cell).strip(), time.time())
            self._runs[cell] = run
            if after := self._after.get(cell):
                after(run)

    def last(self, cell: str) -> CellRun | None:
        """Return the last run of the cell with this id; None if there was none."""
        return self._runs.get(cell)

    def on_run(self, cell: str, after: Callable[[CellRun], None]) -> None:
        """Call ``after`` when the cell runs again, in place of what was given before."""
        self._after[cell] = after


@cache
def cell_runs() -> CellRuns:
    """Return the record of this kernel; outside IPython it stays empty."""
    ipython = sys.modules.get("IPython")
    running = ipython.get_ipython() if ipython is not None else None
    runs = CellRuns()
    if running is not None:
        running.events.register("pre_run_cell", runs.begin)
    return runs


def digest(text: str) -> str:
    """Return a short digest of the text of a cell."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def saved_texts(notebook: Path) -> dict[str, str]:
    """Return the text of each cell of the saved notebook, by its id; empty if it cannot be read."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        return {cell["id"]: "".join(cell["source"]).strip() for cell in cells if "id" in cell}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def edited_since(notebook: Path, cell: str, run: CellRun) -> bool:
    """Return whether the notebook was saved after ``run`` with another text of the cell: it was edited and
    not run again."""
    try:
        saved = notebook.stat().st_mtime
    except OSError:
        return False
    return saved > run.began and saved_texts(notebook).get(cell, run.text) != run.text
