"""``pytest --nbval-lax solutions``: nbval runs each reference notebook at full size, in one kernel.

``solutions/conftest.py`` takes its hooks from here. A lab is collected by its folder, such as
``solutions/15_fsdp``. Its notebook with solutions is written, with the other files of a release, to a
temporary folder, and the stored outputs of its tagged cells are put in (``quoted_outputs``): nbval fails a
cell that raises an exception, and a tagged one whose output differs from the stored one. After the cells,
the item ``whole notebook`` demands full marks, figures without faults, and the results of standard forms that
the text states. The summary has a line for each lab: wall time, CPU time and memory of the kernel and of all
processes that it started, and points.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbval.plugin import IPyNbFile

from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.course import LabInfo, source_labs
from dlo_lib.grading.lab.release import write_release
from dlo_lib.grading.lab.source import source_folder, source_notebook, text_source
from dlo_lib.grading.switch.memory import mapped_bytes, resident_bytes
from tests.cpu_time import descendants, used
from tests.labs.notebook_rules import (
    below_full_marks,
    faults_of_figures,
    points,
    unlike_the_text,
    write_startup,
)
from tests.labs.quoted_outputs import (
    RULES,
    TAG,
    as_cell_outputs,
    as_stored,
    faults_of_tags,
    stale_numbers,
    stored_outputs,
    tagged_cells,
    write_outputs,
)

SAMPLED_EVERY = 0.3  # seconds, of the memory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-outputs",
        action="store_true",
        help="store the outputs of the cells with the tag nbval-check-output instead of comparing them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("the labs run one after another, so that they can be measured: leave out -n")
    config.option.nbval_current_env = config.option.nbval_kernel_name is None
    config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(RULES)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    lab = next((lab for lab in source_labs() if source_folder(lab) == path), None)
    if lab is None or not parent.config.option.nbval_lax:
        return None
    return ReferenceLab.from_parent(parent, path=path, lab=lab)


class ReferenceLab(pytest.Directory):
    """A lab: its notebook and what holds of the whole of it."""

    def __init__(self, lab: LabInfo, **options: Any) -> None:
        super().__init__(**options)
        self.lab = lab

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        text = text_source(self.path).read_text(encoding="utf-8")
        writing = self.config.getoption("--write-outputs")
        if not writing and (faults := faults_of_tags(self.lab.directory, text)):
            raise self.CollectError("\n".join(faults))
        folder = Path(tempfile.mkdtemp(prefix="dlo-course-"))
        self.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        try:
            write_release(self.lab, folder)
        except UserError as error:
            raise self.CollectError(str(error)) from error
        stored = {} if writing else stored_outputs(self.lab.directory)
        tagged = tagged_cells(text)
        notebook = source_notebook(self.path)
        for cell in notebook.cells:
            tags = [tag for tag in cell.metadata.get("tags", []) if tag != TAG]
            if cell.id in tagged and not writing:
                cell.outputs = as_cell_outputs(stored[cell.id])
                cell.execution_count = 1  # nbval compares nothing without one
                tags.append(TAG)
            if cell.metadata.get("tags"):
                cell.metadata.tags = tags
        nbformat.write(notebook, folder / self.lab.notebook)
        file = ReferenceNotebook.from_parent(self, path=folder / self.lab.notebook)
        yield file
        yield WholeNotebook.from_parent(self, name="whole notebook", file=file, text=text)


class ReferenceNotebook(IPyNbFile):
    """The notebook of a lab in a folder that is removed afterwards."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.skip_compare = (*self.skip_compare, "text/html")  # the plain text says the same
        self.wall = self.cpu = 0.0
        self.memory = PeakMemory()
        self._shown: dict[str, nbformat.NotebookNode] = {}

    def collect(self) -> Iterator[pytest.Item]:
        for cell in super().collect():
            cell.output_timeout = self.config.option.nbval_cell_timeout  # 5 s, if the machine is busy
            yield cell

    def get_kernel_message(self, timeout: float | None = None, stream: str = "iopub") -> dict:
        """Give a displayed object the content of its last update, which nbval does not know, and a figure no
        text: the description of a figure has measured times in it, and ``figure_faults`` checks the figure.
        """
        while True:
            message = super().get_kernel_message(timeout, stream)
            content = message["content"]
            identity = content.get("transient", {}).get("display_id")
            if any(name.startswith("image/") for name in content.get("data", ())):
                content["data"] = {name: data for name, data in content["data"].items() if "/png" in name}
            if message["msg_type"] == "display_data" and identity:
                content["data"] = self._shown[identity] = nbformat.from_dict(content["data"])
            if message["msg_type"] != "update_display_data":
                return message
            if identity in self._shown:
                self._shown[identity].clear()
                self._shown[identity].update(content["data"])

    def setup(self) -> None:
        folder = self.path.parent
        self.record = write_startup(folder)
        own = {
            "DLO_HOME": folder / ".home",
            "DLO_WORK": folder / ".home" / "work",
            "DLO_CACHE": Path(tempfile.gettempdir()) / f"dlo-cache-{os.getpid()}",
            "IPYTHONDIR": folder / ".ipython",
        }
        self.config.add_cleanup(lambda: shutil.rmtree(own["DLO_CACHE"], ignore_errors=True))
        with pytest.MonkeyPatch.context() as environment:
            for name, value in own.items():
                environment.setenv(name, str(value))
            for name in ("DLO_LANG", "DLO_HIDDEN", "DLO_COURSE", "OMP_NUM_THREADS", "MPLBACKEND"):
                environment.delenv(name, raising=False)
            self.began, self.cpu_before = time.monotonic(), cpu_of_others()
            super().setup()
        self.memory.start()

    def teardown(self) -> None:
        self.wall, self.cpu = time.monotonic() - self.began, cpu_of_others() - self.cpu_before
        self.memory.stop()
        super().teardown()


def cpu_of_others() -> float:
    """Seconds of CPU time of the descendants of this process, without its own."""
    return used() - time.process_time()


class PeakMemory(threading.Thread):
    """The memory of all descendants of this process, at its highest: of pages that processes share, each has
    its part. They are counted when the sum of the resident memory of all of them, which is cheap to read, is
    higher than before.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._ended = threading.Event()

    def run(self) -> None:
        highest = 0
        while not self._ended.wait(SAMPLED_EVERY):
            pids = descendants(os.getpid())
            resident = sum(map(resident_bytes, pids))
            if resident > highest:
                highest = resident
                self.bytes = max(self.bytes, sum(mapped_bytes(pid).get("Pss", 0) for pid in pids))

    def stop(self) -> None:
        self._ended.set()
        self.join()


class WholeNotebook(pytest.Item):
    """What holds when all cells have run; the last item of a lab."""

    def __init__(self, file: ReferenceNotebook, text: str, **options: Any) -> None:
        super().__init__(**options)
        self.file, self.text = file, text

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"

    def repr_failure(self, error: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(error.value) if error.errisinstance(AssertionError) else super().repr_failure(error)

    def runtest(self) -> None:
        cells = [item for item in self.session.items if item.parent is self.file]
        notebook = self.file.nb
        for item in cells:
            item.cell.outputs = item.test_outputs or []
        got, most = points(notebook)
        lab, file = self.path.name, self.file
        self.config.stash.setdefault(TABLE, []).append(
            (lab, file.wall, file.cpu, file.memory.bytes, got, most)
        )
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        faults = [f"{len(cells)} of {len(code)} cells were to run"] if len(cells) < len(code) else []
        faults += [f"{item.name} did not run" for item in cells if item.test_outputs is None]
        faults += below_full_marks(notebook)
        faults += unlike_the_text(notebook)
        faults += faults_of_figures(file.record, file.path.parent)
        assert not faults, "\n".join(faults)
        if self.config.getoption("--write-outputs"):
            tagged = tagged_cells(self.text)
            after = {cell.id: as_stored(cell.outputs) for cell in code if cell.id in tagged}
            stale = stale_numbers(lab, self.text, stored_outputs(lab), after)
            self.config.stash.setdefault(STALE_NUMBERS, []).extend(stale)
            write_outputs(lab, after)


TABLE = pytest.StashKey[list[tuple[str, float, float, int, float, float]]]()
STALE_NUMBERS = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(TABLE, [])
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section("labs: the kernel and all processes that it started")
    write(f"{'lab':<24}{'wall s':>8}{'CPU s':>8}{'GiB':>7}{'points':>12}")
    for lab, wall, cpu, memory, got, most in rows:
        write(f"{lab:<24}{wall:>8.0f}{cpu:>8.0f}{memory / 2**30:>7.1f}{f'{got:g} of {most:g}':>12}")
    for line in config.stash.get(STALE_NUMBERS, []):
        write(line)
