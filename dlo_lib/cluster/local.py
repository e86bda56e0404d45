"""This machine in place of SLURM: the side of the process that submits, and how its jobs are (``runner`` has the other side)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dlo_lib.cluster.records import Turn, exit_code, mark, marked
from dlo_lib.cluster.states import ElementStatus, State
from dlo_lib.text import tr

_runners: list[subprocess.Popen[bytes]] = []


def start(folder: Path, elements: tuple[int, ...], after: Path | None = None) -> Turn:
    """Start a runner for these elements of the job in ``folder``; it begins when what runs is done, and ``after`` has completed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    runner = subprocess.Popen(
        [sys.executable, "-m", "dlo_lib.cluster.runner", str(folder), str(after or ""), str(os.getpid()), *map(str, elements)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a Ctrl-C in the terminal or an interrupted cell is none of it
    )
    _runners.append(runner)  # waited for by is_alive
    return Turn(runner.pid, elements, _born(runner.pid))


def cancel(folder: Path, turn: Turn, elements: tuple[int, ...]) -> None:
    """Stop the runner of a turn; ``elements`` are those that are not over."""
    for element in elements:
        mark(folder, "cancelled", element)
    if _is_alive(turn):
        with contextlib.suppress(ProcessLookupError):
            os.kill(turn.number, signal.SIGTERM)
    while _is_alive(turn):  # it ends within its grace
        time.sleep(0.05)


def statuses(folder: Path, turn: Turn) -> dict[int, ElementStatus]:
    """How the elements of a turn are."""
    alive = _is_alive(turn)  # before the marks are read: a runner that ends in between has left its own
    return {element: _status(folder, element, alive) for element in turn.elements}


def _status(folder: Path, element: int, alive: bool) -> ElementStatus:
    code = exit_code(folder, element)
    start, elapsed = _times(folder, element)
    if code == 0:
        return ElementStatus(element, State.COMPLETED, "", start, elapsed, 0)
    if marked(folder, "cancelled", element):
        return ElementStatus(element, State.CANCELLED, "", start, elapsed)
    if code is not None:
        return ElementStatus(element, State.FAILED, "", start, elapsed, code)
    if not alive:
        return ElementStatus(element, State.LOST, tr("what submitted it has ended"), start, elapsed)
    if marked(folder, "begun", element):
        return ElementStatus(element, State.RUNNING, "", start, elapsed)
    return ElementStatus(element, State.PENDING, tr("waits for those before it"))


def _times(folder: Path, element: int) -> tuple[str, str]:
    """When an element began and how long it has run or ran, in SLURM's forms."""
    try:
        began = (folder / "begun" / str(element)).stat().st_mtime
    except OSError:
        return "", ""
    try:
        ended = (folder / "ends" / str(element)).stat().st_mtime
    except OSError:
        ended = time.time()
    seconds = max(0, int(ended - began))
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began)), f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _is_alive(turn: Turn) -> bool:
    _runners[:] = [runner for runner in _runners if runner.poll() is None]  # ours that have ended are no longer there
    return _born(turn.number) == turn.born != 0


def _born(process: int) -> int:
    """When a process started, in ticks since the machine did; 0 when there is none. Without /proc: 1 while there is one."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] == "Z" else int(fields[19])
    except FileNotFoundError:
        pass
    if Path("/proc/self").exists():
        return 0
    try:
        os.kill(process, 0)
    except OSError:
        return 0
    return 1
