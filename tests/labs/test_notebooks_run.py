"""Every reference notebook runs from top to bottom in a fresh kernel, away from the checkout,
without an error in any cell, with full marks, and with figures that can be read. What a text says about the
checks of the standard library's form holds.

Sizes are reduced by the variables that lab.toml lists, and the kernels are forked from a process that has
imported torch, as are their ranks and trainings. `make course` runs the same with --full-size, in kernels
started as usual.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import socket
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
from dlo_lib.grading.lab.source import source_folder, source_notebook
from tests.labs.warm_python import write_warm_python

CELL_SECONDS = 600  # far above the 90 s a whole lab may take: it ends a run that hangs
INSTEAD = re.compile(r"^lab\.check\(.*\binstead=", re.MULTILINE)
VERDICT = re.compile(r"\A\w+: [\d.]+ of [\d.]+ points")
ROW = re.compile(r"^  ([✓✗]) (.+?) +[\d.]+/[\d.]+", re.MULTILINE)


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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + trainings_socket())
        listener.listen()
        process = subprocess.Popen(
            [*command, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
            pass_fds=[listener.fileno()],
        )
    with process:
        yield process


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
    if not request.config.getoption("--full-size"):
        warm_trainings(tmp_path)
    # the released one, with the solutions in
    notebook = source_notebook(source_folder(lab))
    execute(notebook, tmp_path)
    ran = [
        cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()
    ]
    assert ran == list(range(1, len(ran) + 1))
    assert list(below_full_marks(notebook)) == []
    assert list(unlike_the_text(notebook)) == []
    figures = [json.loads(line) for line in faults.read_text().splitlines()] if faults.exists() else []
    assert figures or not (tmp_path / "figures.py").exists()
    found = [f"{figure['text'].split('. ')[0]}: {fault}" for figure in figures for fault in figure["faults"]]
    assert not found, "\n".join(found)


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


def trainings_socket() -> str:
    """The name of the socket on which the zygote of this process listens for trainings."""
    return f"dlo-trainings-{os.getpid()}"


def warm_trainings(folder: Path) -> None:
    """In the kernels started from now on, ``sys.executable`` is ``warm_python``."""
    python = folder / ".python"
    write_warm_python(python, trainings_socket())
    startup = folder / ".ipython" / "profile_default" / "startup"
    (startup / "python.py").write_text(f"import sys; sys.executable = {str(python)!r}")


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


def unlike_the_text(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Where ``lab.check(..., instead=...)`` shows another result than the text before the cell says.

    A standard form passes all checks, except those whose titles this text has between “ and ”: they fail.
    """
    text = ""
    for cell in notebook.cells:
        text = cell.source if cell.cell_type == "markdown" else text
        checks = len(INSTEAD.findall(cell.source)) if cell.cell_type == "code" else 0
        if not checks:
            continue
        shown = [output.data["text/plain"] for output in cell.outputs if "data" in output]
        verdicts = [each for each in shown if VERDICT.match(each)]
        if len(verdicts) != checks:
            yield f"{cell.id}: {len(verdicts)} verdicts of {checks} checks: {shown}"
        named = {" ".join(title.split()) for title in re.findall("“([^”]+)”", text)}
        for verdict in verdicts:
            for mark, title in ROW.findall(verdict):
                if (mark == "✗") != (title in named):
                    yield f"{cell.id}: {mark} {title}. The text before names {named or 'no check'}: {verdict}"
