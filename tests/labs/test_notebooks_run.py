"""Every reference notebook runs from top to bottom in a fresh kernel, away from the checkout,
without an error in any cell, and with figures that can be read. What a text says about the checks of the
standard library's form holds. The graded checks run here only for `make proofs` (``--every-check``), because
`test_every_lab` judges the same solutions by the same checks; then they give full marks in the notebook too.

Sizes are reduced by the variables that lab.toml lists, and the kernels are forked from a process that has
imported torch, as are their ranks and trainings. `make course` runs the same at full size, in kernels started
as usual, through nbval (``reference_notebooks``).
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient

from dlo_lib import cluster
from dlo_lib.grading.lab.course import LabInfo, source_labs
from dlo_lib.grading.lab.release import write_release
from dlo_lib.grading.lab.source import source_folder, source_notebook
from tests.labs.notebook_rules import (
    below_full_marks,
    faults_of_figures,
    is_graded,
    unlike_the_text,
    write_startup,
)
from tests.warm import programs_socket
from tests.warm_python import FORKED, write_warm_python

CELL_SECONDS = 600  # far above the 90 s a whole lab may take: it ends a run that hangs


class ForkedKernel:
    """A kernel of the zygote, with those methods of ``subprocess.Popen`` that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, zygote: subprocess.Popen[str], command: list[str], **options: Any) -> None:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        assert command[1] == "-m", f"a kernel is started by {command}"
        request = {"command": command, "folder": str(options["cwd"]), "environment": dict(options["env"])}
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        self._answers = zygote.stdout
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@pytest.mark.slow
@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_reference_notebook_runs(
    lab: LabInfo,
    tmp_path: Path,
    kernel_zygote: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    write_release(lab, tmp_path)
    monkeypatch.setattr(local_provisioner, "launch_kernel", functools.partial(ForkedKernel, kernel_zygote))
    for name, value in lab.reduced.items():
        monkeypatch.setenv(name, value)
    record = write_startup(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    warm_trainings(tmp_path)
    # the released one, with the solutions in
    notebook = source_notebook(source_folder(lab))
    every_check = pytestconfig.getoption("--every-check")
    for cell in notebook.cells:
        if is_graded(cell) and not every_check:
            cell.source = ""
    execute(notebook, tmp_path)
    ran = [
        cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()
    ]
    assert ran == list(range(1, len(ran) + 1))
    assert not every_check or list(below_full_marks(notebook)) == []
    assert list(unlike_the_text(notebook)) == []
    assert list(faults_of_figures(record, tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "marks", "faults"),
    [
        ("It passes your checks:", "✓✓", 0),
        ("It passes your checks:", "✓✗", 1),
        ("It passes your checks, except “Only\nneighbours talk”:", "✓✗", 0),
        ("It passes your checks, except “Only neighbours talk”:", "✓✓", 1),
        ("It passes your checks, except “Only neighbours talk”:", "✗✗", 1),
        ("It passes your checks:", "", 1),
    ],
)
def test_what_the_text_says_of_a_standard_form_is_compared_with_its_checks(
    text: str, marks: str, faults: int
) -> None:
    rows = [
        f"  {mark} {title}  1/1" for mark, title in zip(marks, ("The sum is right", "Only neighbours talk"))
    ]
    shown = ["a table", "\n".join(["ring: 1 of 2 points (3 ms)", *rows])] if marks else ["a table"]
    outputs = [nbformat.v4.new_output("display_data", {"text/plain": each}) for each in shown]
    cell = nbformat.v4.new_code_cell('lab.check("ring", instead={"ring": standard})', outputs=outputs)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text), cell])
    assert len(list(unlike_the_text(notebook))) == faults


def test_a_training_on_this_machine_is_one_that_the_zygote_forks() -> None:
    """Another command line in the script would start each of them in a new Python, which costs 4 s."""
    script = cluster.submit("dlo_lib.train", ["--model", "tiny"], gpus=1, dry_run=True)
    assert f" {' '.join(FORKED)} " in script


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells. Raises what a cell raises, with its traceback, and ends the kernel in any case.

    A kernel ends at once if another process takes one of the ports that were chosen for it: try again.
    """
    for attempt in range(3):
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            startup_timeout=CELL_SECONDS,  # 60 s by default: a loaded machine needs more
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute()
        except RuntimeError as error:
            if attempt == 2 or "Kernel died before replying" not in str(error):
                raise
        else:
            return


def warm_trainings(folder: Path) -> None:
    """In the kernels started from now on, ``sys.executable`` is ``warm_python``."""
    python = folder / ".python"
    write_warm_python(python, programs_socket())
    startup = folder / ".ipython" / "profile_default" / "startup"
    (startup / "python.py").write_text(f"import sys; sys.executable = {str(python)!r}")
