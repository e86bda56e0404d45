"""A step that is not written and bad input give one line; other errors keep their traceback. A cell with a
syntax error is named by the check that judges its earlier definition.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.notebook.failed_cells import FailedCells

CELLS = [
    "from dlo_lib.grading import Lab\nlab = Lab(globals())",
    "def scale(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()",
    "scale(1)",
    "raise NotImplementedError()",
    'raise NotImplementedError("sum for Bool")',
    "lab.hint('scael')",
    "import collections.abc\nclass Never:\n    def go(self):\n        return {}['x']\nNever().go()",
]


def test_a_missing_step_is_one_line(small: LabSource, tmp_path: Path) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.folder, folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    called, at_top, with_words, mistyped, other = (cell.outputs for cell in notebook.cells[2:])
    cure = "write it in its cell (# YOUR CODE HERE), run that cell, and then this one.\n"
    assert [output.text for output in called] == [f"scale is not written yet: {cure}"]
    assert [output.text for output in at_top] == [f"This step is not written yet: {cure}"]
    assert [output.evalue for output in with_words] == ["sum for Bool"]
    (line,) = [output.text for output in mistyped]
    assert line.startswith('unknown question "scael": did you mean scale?')
    assert line.count("\n") == 1
    assert [output.ename for output in other] == ["KeyError"]


SCALE = "import torch\ndef absmax_scale(x):\n    return x.abs().amax(dim=-1) / 127"
EARLIER = [
    "from dlo_lib.grading import Lab\nlab = Lab(globals())",
    SCALE,
    SCALE + ")",
    "lab.check('scale')",
    SCALE,
    "lab.check('scale')",
]


def test_a_cell_with_a_syntax_error_is_named_by_the_check(small: LabSource, tmp_path: Path) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.folder, folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in EARLIER])
    NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    texts = ["".join(str(output.get("data", "")) for output in cell.outputs) for cell in notebook.cells]
    said = "The cell of `absmax_scale` was not run: SyntaxError in line 3."
    assert said in texts[3]
    assert "All checks pass" not in texts[3]
    assert "was not run" not in texts[5]
    assert "All checks pass" in texts[5]


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("def f(x):\n    return )", ["f"]),
        ("class A(B:\n    x = 1", ["A"]),
        ("answers = {'q1': 'a'", ["answers"]),
        ("a: int = 3 +", ["a"]),
        ("if a == 3:\n    b = (", []),
    ],
)
def test_names_are_found_in_a_cell_that_cannot_be_read(cell: str, names: list[str]) -> None:
    cells = FailedCells()
    error = SyntaxError("bad")
    error.lineno = 2
    cells.record(SimpleNamespace(info=SimpleNamespace(raw_cell=cell), error_before_exec=error))
    assert [name for name in ("f", "A", "answers", "a", "b", "x") if cells.explain([name])] == names
