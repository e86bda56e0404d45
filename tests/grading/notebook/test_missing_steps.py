"""A step that is not written stops *Run All* with one line; other errors keep their traceback."""

import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from dlo_lib.grading.lab.source import LabSource

CELLS = [
    "from dlo_lib.grading import Lab\nlab = Lab(globals())",
    "def scale(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()",
    "scale(1)",
    "raise NotImplementedError()",
    'raise NotImplementedError("sum for Bool")',
    "import collections.abc\nclass Never:\n    def go(self):\n        return {}['x']\nNever().go()",
]


def test_a_missing_step_is_one_line(small: LabSource, tmp_path: Path) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.folder, folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    called, at_top, with_words, other = (cell.outputs for cell in notebook.cells[2:])
    cure = "write it in its cell (# YOUR CODE HERE), run that cell, and then this one.\n"
    assert [output.text for output in called] == [f"scale is not written yet: {cure}"]
    assert [output.text for output in at_top] == [f"This step is not written yet: {cure}"]
    assert [output.evalue for output in with_words] == ["sum for Bool"]
    assert [output.ename for output in other] == ["KeyError"]
