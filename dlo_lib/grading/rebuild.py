"""The notebook an instructor and a student see after grading: the release, with the student's answers and own cells put in.

Everything else comes from the source: an edited or deleted test cell, points changed, a cell pasted twice, metadata broken or of another
schema then leave no trace, and nothing that a file can hold stops the grading of a class.
"""

from __future__ import annotations

import json
from typing import IO, Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import source_folder

MOST_CELLS = 2_000
MOST_CHARACTERS = 200_000  # of one cell: longer is no person's answer, and would only make the feedback page unreadable


def rebuild(lab: LabInfo, submission: IO[str]) -> NotebookNode:
    """The release of ``lab`` with the answers of ``submission``; cells that the student added stand behind the cell they followed."""
    notebook = release_notebook(source_folder(lab))
    behind: dict[str, list[NotebookNode]] = {cell.id: [cell] for cell in notebook.cells}
    open_answers = {cell.id for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("solution")}
    at_the_top: list[NotebookNode] = []
    place = at_the_top
    for cell in _cells(submission)[:MOST_CELLS]:
        identity, source = _identity(cell), _text(cell.get("source"))[:MOST_CHARACTERS]
        if identity in behind:
            place = behind[identity]
            if identity in open_answers:
                place[0].source = source
                open_answers.remove(identity)  # of an answer pasted twice the first counts
        elif source.strip():
            place.append(new_code_cell(source) if cell.get("cell_type") == "code" else new_markdown_cell(source))
    notebook.cells = [*at_the_top, *(cell for cells in behind.values() for cell in cells)]
    for number, cell in enumerate(notebook.cells):
        if cell.id not in behind:
            cell.id = f"own-{number}"  # nbformat's own ids are random: the same submission is to give the same bytes
    return notebook


def _cells(submission: IO[str]) -> list[dict[str, Any]]:
    try:
        read = json.load(submission)
    except (ValueError, RecursionError):
        return []
    cells = read.get("cells") if isinstance(read, dict) else None
    return [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []


def _identity(cell: dict[str, Any]) -> str:
    """Which cell of the release this is: by nbgrader's id, which survives other tools, else by the cell's own."""
    metadata = cell.get("metadata")
    grading = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    name = grading.get("grade_id") if isinstance(grading, dict) else None
    return str(name or cell.get("id"))


def _text(source: object) -> str:
    parts = source if isinstance(source, list) else [source]
    return "".join(part for part in parts if isinstance(part, str))
