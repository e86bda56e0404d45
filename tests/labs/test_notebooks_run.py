"""Every reference notebook runs from top to bottom in a fresh kernel, away from the checkout,
without an error in any cell, with full marks, and with figures that can be read.

Sizes are reduced by the variables that lab.toml lists, and the kernels are forked from a process that has
imported torch. `make course` runs the same with --full-size, in kernels started as usual.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient

from dlo_lib.grading.lab.course import LabInfo, source_labs
from dlo_lib.grading.lab.release import write_release
from dlo_lib.grading.lab.source import build_notebook, source_folder

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


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """Ended and waited for, so that its CPU time is counted."""
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # no fork survives a thread
    command = [sys.executable, str(Path(__file__).with_name("kernel_zygote.py")), str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_reference_notebook_runs(
    lab: LabInfo, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_release(lab, tmp_path)
    if not request.config.getoption("--full-size"):
        zygote = request.getfixturevalue("zygote")
        monkeypatch.setattr(local_provisioner, "launch_kernel", functools.partial(ForkedKernel, zygote))
        for name, value in lab.reduced.items():
            monkeypatch.setenv(name, value)
    faults = recorded_faults(tmp_path, monkeypatch)
    # the released one, with the solutions in
    notebook = nbformat.read(build_notebook(source_folder(lab)), as_version=4)
    execute(notebook, tmp_path)
    ran = [
        cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()
    ]
    assert ran == list(range(1, len(ran) + 1))
    assert list(below_full_marks(notebook)) == []
    figures = [json.loads(line) for line in faults.read_text().splitlines()] if faults.exists() else []
    assert figures or not (tmp_path / "figures.py").exists()
    found = [f"{figure['text'].split('. ')[0]}: {fault}" for figure in figures for fault in figure["faults"]]
    assert not found, "\n".join(found)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells. Raises what a cell raises, with its traceback, and ends the kernel in any case.

    A kernel ends at once if another process takes one of the ports that were chosen for it: try again.
    """
    for attempt in range(3):
        client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}})
        try:
            client.execute()
        except RuntimeError as error:
            if attempt == 2 or "Kernel died before replying" not in str(error):
                raise
        else:
            return


def recorded_faults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels started from now on write the faults of their figures to the file returned."""
    startup = folder / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    target = folder / ".faults.jsonl"
    source = Path(__file__).with_name("figure_faults.py")
    begin = f"import runpy; runpy.run_path({str(source)!r})['record_faults']({str(target)!r})"
    (startup / "faults.py").write_text(begin)
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))
    return target


def below_full_marks(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """The headings of the checks whose points are not all of those that the notebook can give."""
    for cell in notebook.cells:
        if cell.cell_type != "code" or not cell.metadata.get("nbgrader", {}).get("grade"):
            continue
        texts = [output.data["text/plain"] for output in cell.outputs if "data" in output]
        if not any("All checks pass" in text for text in texts):
            yield f"{cell.metadata.nbgrader.grade_id}: {texts}"
