"""Live ranks: `%%ranks` compared with nbdistributed and jupyter-distributed, in kernels with four ranks.

The start is the time from the start of the kernel to the end of a first cell with an all-reduce. CPU time is
that of the kernel and of all processes that it started. Memory is the proportional set size of all of them
after the first cells. At the end a rank skips a collective: the row says what the notebook shows, and whether
the next cell runs.

The peers are installed in a separate environment, in a temporary folder, which sees the packages of this
one. jupyter-distributed normally restarts a kernel through its extension of the Jupyter server. Here its
kernel is started directly, which leaves out the time of that restart.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.provisioning import LocalProvisioner

from benchmarks.paired import Row, Turn, Turns, compare

WORLD_SIZE = 4
ROWS = 6  # measured alternately, so that all rows are complete at the same time
PEERS = ("nbdistributed==0.1.0", "jupyter-distributed==0.1.1")
CELLS = 20
SILENT_S = 10.0
"""How long a cell after a deadlock may say nothing."""
_START_S = 200
_ATTEMPTS = 3  # a peer's start fails now and then
_IMPORTS = "import torch, torch.distributed as dist\n"
_SKIP = "if dist.get_rank() != 2:\n    dist.all_reduce(x)"
_AGAIN = "y = torch.ones(1)\ndist.all_reduce(y)\nprint(int(y))"


@dataclass(frozen=True)
class Kind:
    """How a notebook gets four ranks.

    Attributes:
        module: the kernel.
        first: cells that start the ranks.
        magic: the first line of a cell that runs on all ranks.
    """

    name: str
    module: str
    first: tuple[str, ...]
    magic: str
    environment: tuple[tuple[str, str], ...] = ()


OURS = Kind("%%ranks", "ipykernel_launcher", ("%load_ext dlo_lib.live_ranks",), f"%%ranks {WORLD_SIZE}\n")
THEIRS = (
    Kind(
        "nbdistributed",
        "ipykernel_launcher",
        ("%load_ext nbdistributed", f"%dist_init -n {WORLD_SIZE}"),
        "",
    ),
    Kind(
        "jupyter-distributed",
        "jupyter_distributed.kernel",
        (_IMPORTS + 'dist.init_process_group("gloo")',),
        "",
        (("JUPYTER_DISTRIBUTED_WORLD_SIZE", str(WORLD_SIZE)),),
    ),
)


class NotStarted(Exception):
    """The ranks did not start, or a cell that should succeed did not."""


class Notebook:
    """A kernel with four ranks, driven as a notebook drives it."""

    def __init__(self, kind: Kind, python: str, folder: Path) -> None:
        began = time.perf_counter()
        self._kind = kind
        self._manager = KernelManager(connection_file=str(folder / f"{kind.name.strip('%')}-{began}.json"))
        argv = [python, "-m", kind.module, "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=argv, display_name=kind.name, language="python")
        path = f"{Path(python).parent}:{os.environ['PATH']}"  # nbdistributed starts the python of the PATH
        self._manager.start_kernel(
            env={**os.environ, "PATH": path, **dict(kind.environment)}, cwd=str(folder)
        )
        assert isinstance(self._manager.provisioner, LocalProvisioner)
        self._kernel = psutil.Process(self._manager.provisioner.pid)
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_START_S)
        try:
            for code in kind.first:
                self.run(code, magic=False)
            self._first_cell(began + _START_S)
        except NotStarted:
            self.close()
            raise
        self.start = Turn(time.perf_counter() - began, self._cpu(), self._memory())

    def cell(self, code: str, magic: bool = True, limit: float = _START_S) -> str | None:
        """Run a cell; return the text that it shows with "error" in front if it fails, or None if it does not
        end in time."""
        shown: list[str] = []
        failed = False
        request = self.client.execute((self._kind.magic if magic else "") + code, allow_stdin=False)
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            try:
                message = self.client.get_iopub_msg(timeout=left)
            except Empty:
                break
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if content.get("execution_state") == "idle":
                return "error " * failed + "\n".join(shown)
            data = content.get("data", {})
            shown.append(content.get("text") or str(data.get("text/plain", "")))
            shown.extend(content.get("traceback", ()))
            failed = failed or message["msg_type"] == "error" or "Error executing" in shown[-1]
        return None

    def run(self, code: str, magic: bool = True, shows: str = "") -> None:
        """Run a cell that should succeed and show a text."""
        shown = self.cell(code, magic)
        if shown is None or shown.startswith("error ") or shows not in shown:
            raise NotStarted(f"{self._kind.name}: {code!r}: {shown}")

    def _first_cell(self, until: float) -> None:
        """Run a cell until it succeeds: the ranks of nbdistributed have started, it says, while they import
        torch, and a cell fails after 30 s of that."""
        while True:
            try:
                self.run(
                    "x = torch.ones(1)\ndist.all_reduce(x)\nprint(f'sum {int(x)}')", shows=f"sum {WORLD_SIZE}"
                )
            except NotStarted:
                if time.perf_counter() > until:
                    raise
            else:
                return

    def timed_cell(self) -> Turn:
        """Run a cell with one all-reduce."""
        cpu, wall = self._cpu(), time.perf_counter()
        self.run("dist.all_reduce(x)")
        return Turn(time.perf_counter() - wall, self._cpu() - cpu, memory=0)

    def skip_a_collective(self) -> str:
        """Let rank 2 skip a collective; return what the notebook shows, and what the next cell does."""
        began = time.perf_counter()
        shown = self.cell(_SKIP, limit=SILENT_S)
        if shown is None:
            first = f"silent for {SILENT_S:.0f} s"
            self._manager.interrupt_kernel()
            time.sleep(1)
        else:
            named = "DEADLOCK" in shown and "rank 2" in shown
            first = (
                f"{'explained' if named else 'ended unexplained'} after {time.perf_counter() - began:.1f} s"
            )
        again = self.cell(_AGAIN, limit=SILENT_S)
        if again is None:
            second = f"the next cell does not end in {SILENT_S:.0f} s"
        else:
            sums = again.count(str(WORLD_SIZE))
            second = "the next cell works" if sums and "error" not in again.lower() else "the next cell fails"
        return f"{first}, {second}"

    def close(self) -> None:
        """End the kernel and all that it started."""
        family = self._family()
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=30)

    def _family(self) -> list[psutil.Process]:
        return [self._kernel, *self._kernel.children(recursive=True)]

    def _cpu(self) -> float:
        # User and system time of the process, and of its children that have ended.
        return sum(sum(process.cpu_times()[:4]) for process in self._family())

    def _memory(self) -> int:
        return sum(process.memory_full_info().pss for process in self._family())


def rows(pairs: int = 5) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = _environment(folder / "peers")
        kinds = (OURS, *THEIRS)
        starts: dict[str, list[Turn]] = {kind.name: [] for kind in kinds}
        cells: dict[str, list[Turn]] = {kind.name: [] for kind in kinds}
        after: dict[str, list[str]] = {kind.name: [] for kind in kinds}
        failed: list[str] = []
        for pair in range(pairs):
            for kind in kinds if pair % 2 == 0 else kinds[::-1]:
                with _notebook(kind, python, folder, failed) as notebook:
                    starts[kind.name].append(notebook.start)
                    turns = [notebook.timed_cell() for _ in range(CELLS)]
                    cells[kind.name].append(_median(turns))
                    after[kind.name].append(notebook.skip_a_collective())
                said = f"start {starts[kind.name][-1].wall:.1f} s; {after[kind.name][-1]}"
                print(f"  {kind.name}: {said}", file=sys.stderr)
    ours = OURS.name
    for peer in (kind.name for kind in THEIRS):
        again = failed.count(peer)
        yield _row(
            f"start ({again} failed and tried again)" if again else "start",
            peer,
            starts[ours],
            starts[peer],
            "s",
        )
        yield _row("a cell with one all-reduce", peer, cells[ours], cells[peer], "ms")
        note = f"{_counted(after[ours])}; {peer}: {_counted(after[peer])}"
        yield Row("a rank skips a collective", peer, WORLD_SIZE, note=note)


@contextmanager
def _notebook(kind: Kind, python: str, folder: Path, failed: list[str]) -> Iterator[Notebook]:
    """Start a notebook. A start that fails is tried again twice, and named in ``failed``."""
    for attempt in range(_ATTEMPTS):
        try:
            notebook = Notebook(kind, python, folder)
            break
        except NotStarted as error:
            failed.append(kind.name)
            print(f"  a start has failed: {error}", file=sys.stderr)
            if attempt == _ATTEMPTS - 1:
                raise
    try:
        yield notebook
    finally:
        notebook.close()


def _environment(folder: Path) -> str:
    """Install the peers beside this environment's packages; return the Python."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    here = [sysconfig.get_path("purelib"), str(Path(__file__).parents[1])]
    (site / "beside.pth").write_text("\n".join(here), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--prefix={folder}", *PEERS]
    subprocess.run(command, check=True)
    return str(folder / "bin" / "python")


def _median(turns: list[Turn]) -> Turn:
    wall, cpu = (statistics.median(getattr(turn, clock) for turn in turns) for clock in ("wall", "cpu"))
    return Turn(wall, cpu, memory=0)


def _row(name: str, peer: str, ours: list[Turn], theirs: list[Turn], unit: str) -> Row:
    note = f"{_words(ours, unit)} against {_words(theirs, unit)}"
    return compare(name, peer, WORLD_SIZE, Turns(ours, theirs), note=note)


def _words(turns: list[Turn], unit: str) -> str:
    scale, digits = (1000, 0) if unit == "ms" else (1, 1)
    wall, cpu = (
        statistics.median(getattr(turn, clock) for turn in turns) * scale for clock in ("wall", "cpu")
    )
    memory = statistics.median(turn.memory for turn in turns) / 2**20
    said = f"{wall:.{digits}f} {unit} (CPU {cpu:.{digits}f} {unit})"
    return f"{said}, {memory:.0f} MiB" if memory else said


def _counted(said: list[str]) -> str:
    return " / ".join(f"{text} ({said.count(text)} of {len(said)})" for text in dict.fromkeys(said))
