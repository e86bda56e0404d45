"""A step that is not written and bad input give one line; other errors keep their traceback. A cell with a
syntax error is named by the check that judges its earlier definition.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jupyter_client
import nbformat
import pytest
from nbclient import NotebookClient

from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.notebook.failed_cells import FailedCells

# Python 3.14 starts the workers of a DataLoader so, and they know no function of a notebook.
AS_3_14 = (
    "import multiprocessing\n"
    "multiprocessing.get_all_start_methods = lambda: ['forkserver', 'fork', 'spawn']\n"
    "multiprocessing.set_start_method('forkserver', force=True)\n"
)
CELLS = [
    f"{AS_3_14}from dlo_lib.grading import Lab\nlab = Lab(globals())",
    "def scale(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()",
    "scale(1)",
    "raise NotImplementedError()",
    'raise NotImplementedError("sum for Bool")',
    "lab.hint('scael')",
    "from torch.utils.data import DataLoader\nlist(DataLoader([1, 2], num_workers=1, worker_init_fn=scale))",
    "import collections.abc\nclass Never:\n    def go(self):\n        return {}['x']\nNever().go()",
]


@pytest.fixture(scope="module")
def kernel() -> Iterator[jupyter_client.KernelManager]:
    """One kernel for all notebooks: its start, and its imports, take more time than the cells."""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture
def execute(kernel: jupyter_client.KernelManager) -> Callable[[nbformat.NotebookNode, Path], None]:
    """Execute a notebook in its folder, without the names of the notebook before."""

    def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
        begin = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}")
        whole = nbformat.v4.new_notebook(cells=[begin, *notebook.cells])
        client = NotebookClient(whole, km=kernel, timeout=600, startup_timeout=600, allow_errors=True)
        client.coalesce_streams = True  # a kernel flushes by a clock: one line can come in two outputs
        client.execute()
        notebook.cells = whole.cells[1:]

    return run


def test_a_missing_step_is_one_line(small: LabSource, tmp_path: Path, execute: Callable) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    execute(notebook, folder)
    called, at_top, with_words, mistyped, worker, other = (cell.outputs for cell in notebook.cells[2:])
    cure = "write it in its cell (# YOUR CODE HERE), run that cell, and then this one.\n"
    assert [output.text for output in called] == [f"scale is not written yet: {cure}"]
    assert [output.text for output in worker] == [f"scale is not written yet: {cure}"]
    assert [output.text for output in at_top] == [f"This step is not written yet: {cure}"]
    assert [output.evalue for output in with_words] == ["sum for Bool"]
    (line,) = [output.text for output in mistyped]
    assert line.startswith('unknown question "scael": did you mean scale?')
    assert line.count("\n") == 1
    assert [output.ename for output in other] == ["KeyError"]


SKIPPED = [
    ("markdown", "# Lab"),
    ("code", "from dlo_lib.grading import Lab\nlab = Lab(globals())"),
    ("markdown", "Text.\n## 2 · The model\nMore text."),
    ("skipped", "# A comment\nimport math\n\n\ndef train():\n    return math.pi\n\n\n%timeit 1"),
    ("skipped", "# A comment\nimport math\n\n\ndef train():\n    return math.pi"),
    ("code", "train()"),
    ("code", "from dlo_lib.launch import run_ranks\nrun_ranks(lambda: train(), 1)"),
    ("code", "never_defined"),
    ("code", "from dlo_lib.launch import run_ranks\nrun_ranks(lambda: 1 / 0, 1)"),
]


def test_an_undefined_name_names_the_cell_that_was_skipped(
    small: LabSource, tmp_path: Path, execute: Callable
) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [(kind, new.get(kind, nbformat.v4.new_code_cell)(source)) for kind, source in SKIPPED]
    whole = nbformat.v4.new_notebook(cells=[cell for _, cell in cells])
    nbformat.write(whole, folder / f"{small.info.name}.ipynb")
    run = nbformat.v4.new_notebook(cells=[cell for kind, cell in cells if kind == "code"])
    execute(run, folder)
    here, on_a_rank, unknown, other = (cell.outputs for cell in run.cells[1:])
    for outputs, kind in ((here, "NameError"), (on_a_rank, "RankFailure")):
        error, said = outputs
        assert error.ename == kind
        assert said.name == "stderr"
        assert "`train` is defined in another cell" in said.text
        assert 'begins with `import math`, below the heading "2 · The model"' in said.text
    assert [output.ename for output in unknown] == ["NameError"]
    assert [output.ename for output in other] == ["RankFailure"]


def test_a_check_names_the_cell_that_was_skipped(small: LabSource, tmp_path: Path, execute: Callable) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    code, markdown = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    setup = "from dlo_lib.grading import Lab\nlab = Lab(globals())"
    given = "def largest(x):\n    return x.abs().amax(dim=-1)"
    answer, check = "def absmax_scale(x):\n    return largest(x) / 127", "lab.check('scale')"
    cells = [code(setup), markdown("## 1 · Scales"), code(given), code(answer), code(check)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{small.info.name}.ipynb")
    cells = [code(source) for source in (setup, check, answer, check, given, check)]
    run = nbformat.v4.new_notebook(cells=cells)
    execute(run, folder)
    no_answer, no_helper, right = ("".join(str(o.data) for o in run.cells[i].outputs) for i in (1, 3, 5))
    assert "`absmax_scale` is defined in another cell, which has not run" in no_answer
    assert "`largest` is defined in another cell, which has not run" in no_helper
    assert 'begins with `def largest(x):`, below the heading "1 · Scales"' in no_helper
    assert "another cell" not in right
    assert "All checks pass" in right


def test_a_fresh_kernel_names_the_cell_with_the_lab(
    small: LabSource, tmp_path: Path, execute: Callable
) -> None:
    """After a restart no cell of the lab has run, so nothing of the lab is loaded but the extension."""
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    code, markdown = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    setup = "from dlo_lib.grading import Lab\nlab = Lab(globals())"
    saved = nbformat.v4.new_notebook(
        cells=[markdown("## 1 · Begin"), code(setup), code("lab.check('scale')")]
    )
    nbformat.write(saved, folder / f"{small.info.name}.ipynb")
    load = "%reload_ext dlo_lib.grading.notebook.fresh_kernel"
    run = nbformat.v4.new_notebook(cells=[code(load), code("lab.check('scale')"), code("%cd -q ..\nlab")])
    execute(run, folder)
    (error, said), (elsewhere,) = (cell.outputs for cell in run.cells[1:])
    assert error.ename == elsewhere.ename == "NameError"
    assert "`lab` is defined in another cell" in said.text
    assert 'begins with `from dlo_lib.grading import Lab`, below the heading "1 · Begin"' in said.text


ENDLESS = "def absmax_scale(x):\n    while True:\n        x = x + 1"


def test_a_running_check_shows_that_it_lives_and_its_interrupt_is_one_sentence(
    kernel: jupyter_client.KernelManager, small: LabSource, tmp_path: Path, execute: Callable
) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    setup = "from dlo_lib.grading import Lab\nlab = Lab(globals())\nimport dlo_lib.grading.notebook"
    faster = "dlo_lib.grading.notebook.verdict_display.EVERY_S = 0.1"
    cells = [nbformat.v4.new_code_cell(text) for text in (setup, faster)]
    execute(nbformat.v4.new_notebook(cells=cells), folder)
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready()

    def run(text: str, stop_at: str = "") -> list[str]:
        """Run a cell; interrupt it when an output has ``stop_at``. Return its outputs as texts."""
        asked, outputs = client.execute(text), []
        while True:
            message = client.get_iopub_msg(timeout=120)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind in ("stream", "error"):
                outputs.append(content.get("text") or content["ename"])
            elif kind in ("display_data", "update_display_data"):
                outputs.append(content["data"]["text/plain"])
                if stop_at and stop_at in outputs[-1]:
                    kernel.interrupt_kernel()
                    stop_at = ""

    try:
        run(ENDLESS)
        running = "scale: check 1 of 2 is running, “One scale a row”"
        *alive, ended, said = run("lab.check('scale')", stop_at=running)
        assert alive
        assert all(text.startswith(running) for text in alive)
        assert ended == "scale: interrupted."
        assert re.fullmatch(
            r"The check “One scale a row” was interrupted; nothing is recorded. Your code was in line [23]: "
            r"`(while True:|x = x \+ 1)`\n",
            said,
        )
        # On a slow machine line 2 has sent its output and has not returned when it is interrupted.
        (said,) = run("print('begun', flush=True)\ndisplay('begun')\nwhile True: pass", stop_at="begun")[2:]
        assert re.fullmatch(
            r"Interrupted\. Your code was in line (2: `display\('begun'\)`|3: `while True: pass`)\n", said
        )
    finally:
        client.stop_channels()


SCALE = "import torch\ndef absmax_scale(x):\n    return x.abs().amax(dim=-1) / 127"
EARLIER = [
    "from dlo_lib.grading import Lab\nlab = Lab(globals())",
    SCALE,
    SCALE + ")",
    "lab.check('scale')",
    SCALE,
    "lab.check('scale')",
    "class absmax_scale:\n    raise NotImplementedError('left')",
    "lab.check('scale')",
    SCALE + "\n1 / 0",
    "lab.check('scale')",
]


def test_a_check_names_a_cell_that_failed_and_left_the_earlier_definition(
    small: LabSource, tmp_path: Path, execute: Callable
) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in EARLIER])
    execute(notebook, folder)
    texts = ["".join(str(output.get("data", "")) for output in cell.outputs) for cell in notebook.cells]
    said = "The last run of the cell of `absmax_scale` ended with"
    assert f"{said} SyntaxError in line 3." in texts[3]
    assert "All checks pass" not in texts[3]
    assert f"{said} NotImplementedError in line 2." in texts[7]
    for replaced in (texts[5], texts[9]):
        assert said not in replaced
        assert "All checks pass" in replaced


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
    cells = FailedCells({})
    cells.begin(SimpleNamespace(raw_cell=cell))
    cells.end(SimpleNamespace(error_before_exec=SyntaxError("bad"), error_in_exec=None))
    assert [name for name in ("f", "A", "answers", "a", "b", "x") if cells.explain([name])] == names
