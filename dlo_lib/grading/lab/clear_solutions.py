"""How a lab's solutions are taken out: nbgrader's ``ClearSolutions`` with one addition.

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

OWN_STUB = re.compile(r"^([ \t]*)### BEGIN SOLUTION: *(.+)\n(?:.*\n)*?[ \t]*### END SOLUTION", re.MULTILINE)


class ClearLabSolutions(ClearSolutions):
    """Replace each solution region by nbgrader's stub, or by the line the region names."""

    def _replace_solution_region(self, cell: NotebookNode, language: str) -> bool:
        cell.source, named = OWN_STUB.subn(r"\1\2", cell.source)
        return super()._replace_solution_region(cell, language) or named > 0
