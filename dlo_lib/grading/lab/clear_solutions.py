"""How a lab's solutions are taken out: nbgrader's ``ClearSolutions`` with two additions.

The tag of a cell whose output ``make course`` compares is taken out too: a released notebook has no outputs.
A region may name the line that replaces it, where a raised
``NotImplementedError`` would only be in the way, as in a quiz::

    ### BEGIN SOLUTION: quiz = {"q1": "", "q2": ""}
    quiz = {"q1": "b", "q2": "a"}
    ### END SOLUTION
"""

from __future__ import annotations

import re

from nbformat import NotebookNode
from nbgrader.preprocessors import ClearSolutions

CHECKED_TAG = "nbval-check-output"
OWN_STUB = re.compile(r"^([ \t]*)### BEGIN SOLUTION: *(.+)\n(?:.*\n)*?[ \t]*### END SOLUTION", re.MULTILINE)


class ClearLabSolutions(ClearSolutions):
    """Replace each solution region by nbgrader's stub, or by the line the region names; remove the tag for
    nbval.
    """

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict, cell_index: int
    ) -> tuple[NotebookNode, dict]:
        """Change one cell of a notebook that students will get."""
        tags = cell.metadata.get("tags", [])
        if CHECKED_TAG in tags:
            cell.metadata["tags"] = [tag for tag in tags if tag != CHECKED_TAG]
            if not cell.metadata["tags"]:
                del cell.metadata["tags"]
        return super().preprocess_cell(cell, resources, cell_index)

    def _replace_solution_region(self, cell: NotebookNode, language: str) -> bool:
        cell.source, named = OWN_STUB.subn(r"\1\2", cell.source)
        return super()._replace_solution_region(cell, language) or named > 0
