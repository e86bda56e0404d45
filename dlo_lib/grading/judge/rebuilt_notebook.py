"""The notebook that instructors and students see after grading: the release with the student's answers and
added code cells.

It shows what was judged: the answers and added cells are those that :mod:`dlo_lib.grading.judge.cells` reads
from the file; everything else comes from the source. Edited or deleted test cells, changed points, and broken
metadata have no effect, and no file can stop the grading of a class.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from dlo_lib.grading.judge.cells import Origin, Submission
from dlo_lib.grading.judge.intake import Invalid, open_notebook
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, text_source

MOST_CHARACTERS = 200_000  # of one cell: a longer one is cut, so that the feedback page stays readable


def rebuild_file(lab: LabSource, path: Path) -> NotebookNode:
    """Return the release of ``lab`` with the answers in the notebook at ``path``, or the bare release if that
    is invalid.
    """
    try:
        return rebuild(lab, open_notebook(path, lab)[0])
    except Invalid:  # the judge reports the reason
        return rebuild(lab, None)


def rebuild(lab: LabSource, submission: Submission | None) -> NotebookNode:
    """Return the release of ``lab`` with the answers in ``submission``; without one, the bare release."""
    notebook = copy.deepcopy(_released(lab.folder, text_source(lab.folder).stat().st_mtime_ns))
    if submission is None:
        return notebook
    behind: dict[str, list[NotebookNode]] = {cell.id: [cell] for cell in notebook.cells}
    at_the_top: list[NotebookNode] = []
    place = at_the_top
    for cell in submission.cells:
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
