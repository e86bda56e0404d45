"""The notebook an instructor and a student see after grading: the release, with the student's answers and own code cells put in.

It shows what was judged: the cells are those that :mod:`dlo_lib.grading.cells` takes from the file, everything else comes from the source.
An edited or deleted test cell, points changed, metadata broken or of another schema then leave no trace, and no file stops a class.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from dlo_lib.grading.cells import Origin
from dlo_lib.grading.intake import Invalid, open_notebook
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import LabSource, text_source

MOST_CHARACTERS = 200_000  # of one cell: longer is no person's answer, and would only make the feedback page unreadable


def rebuild(lab: LabSource, submission: Path) -> NotebookNode:
    """The release of ``lab`` with the answers of the file ``submission``, or the bare release when that cannot be graded."""
    notebook = copy.deepcopy(_released(lab.folder, text_source(lab.folder).stat().st_mtime_ns))
    try:
        taken, _ = open_notebook(submission, lab)
    except Invalid:  # the judge says why in its report
        return notebook
    behind: dict[str, list[NotebookNode]] = {cell.id: [cell] for cell in notebook.cells}
    at_the_top: list[NotebookNode] = []
    place = at_the_top
    for cell in taken.cells:
        source = cell.source[:MOST_CHARACTERS]
        if cell.origin is Origin.EXTRA:
            place.append(new_code_cell(source, id=cell.id))
            continue
        place = behind[cell.id]
        if cell.origin is Origin.ANSWER:
            place[0].source = source
    notebook.cells = [*at_the_top, *(cell for cells in behind.values() for cell in cells)]
    return notebook


@lru_cache(maxsize=8)
def _released(folder: Path, modified: int) -> NotebookNode:
    return release_notebook(folder)
