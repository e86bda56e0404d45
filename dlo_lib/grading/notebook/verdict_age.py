"""Whether a verdict is still about the text of its cell.

A verdict stays in the notebook, also after the cell above it was edited, and after a reload of the page.
Three cases are reported: the cell was edited before the check and not run; it runs with another text after
the check; and after a restart, the saved cell differs from the one that was judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.verdict import QuestionVerdict
from dlo_lib.grading.notebook.cell_runs import CellRun, digest, edited_since, saved_texts
from dlo_lib.grading.notebook.verdict_display import VerdictDisplay


def changed_before(notebook: Path, question: str, cell: CellRun | None) -> str:
    """Return the sentence on a cell that was edited and saved after its last run ``cell``; "" otherwise."""
    if cell is None or not edited_since(notebook, question, cell):
        return ""
    return tr(
        "Its cell has been edited since it ran last, and this verdict is about the text that ran: run the "
        "cell, then this check."
    )


def show_outdated(verdict: QuestionVerdict, display: VerdictDisplay, judged: CellRun, now: CellRun) -> None:
    """Mark the shown ``verdict`` on ``judged`` if its cell runs ``now`` with another text, else unmark it."""
    changed = ""
    if now.text != judged.text:
        changed = tr("Its cell has run with another text since: run this check again.")
    display.show(replace(verdict, changed=changed).shown())


def older_verdicts(notebook: Path, judged: Mapping[str, tuple[str, float]]) -> str:
    """Return the sentence on the questions whose cell was saved with another text after its last check; "" if
    there is none.

    Args:
        notebook: the saved notebook.
        judged: question → digest of the text that its last check judged, and the time of that check.
    """
    try:
        saved_at = notebook.stat().st_mtime
    except OSError:
        return ""
    saved = saved_texts(notebook) if judged else {}
    older = [
        name
        for name, (text, at) in judged.items()
        if name in saved and saved_at > at and digest(saved[name]) != text
    ]
    if not older:
        return ""
    return tr(
        "The verdicts below on {questions} are about an earlier text of the cells: run the cells, then their "
        "checks.",
        questions=", ".join(f"`{name}`" for name in older),
    )
