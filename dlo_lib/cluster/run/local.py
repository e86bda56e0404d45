"""This machine in place of SLURM: the submitting process's side and the states of its jobs.

See ``runner``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.lifetime import start_time
from dlo_lib.base.text import tr
from dlo_lib.cluster.run.dependency import Dependency
from dlo_lib.cluster.run.records import Turn, exit_code, mark, marked, progress_of
from dlo_lib.cluster.slurm.commands import submission_environment
from dlo_lib.cluster.slurm.states import ElementStatus, State, stopped_early

_runners: list[subprocess.Popen[bytes]] = []


def start(folder: Path, elements: tuple[int, ...], after: Dependency | None = None) -> Turn:
    """Start a runner for these elements of the job in ``folder``.

    It starts them after all earlier jobs, and when the job in ``after`` has ended as wanted.
    """
    runner = subprocess.Popen(
        trusted_python(
            "from dlo_lib.cluster.job.runner import main; main()",
            str(folder),
            "" if after is None else str(after.folder),
            "" if after is None else after.kind,
            str(os.getpid()),
            *map(str, elements),
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=submission_environment(),
        start_new_session=True,  # Ctrl-C in the terminal or an interrupted cell does not reach it
    )
    _runners.append(runner)  # _is_alive waits for it
    return Turn(runner.pid, elements, start_time(runner.pid))


def cancel(folder: Path, turn: Turn, elements: tuple[int, ...]) -> None:
    """Stop the runner of a turn; ``elements`` are those that have not ended."""
    for element in elements:
        mark(folder, "cancelled", element)
    if _is_alive(turn):
        with contextlib.suppress(ProcessLookupError):
            os.kill(turn.number, signal.SIGTERM)
    while _is_alive(turn):  # it ends within its grace period
        time.sleep(0.05)


def statuses(folder: Path, turn: Turn) -> dict[int, ElementStatus]:
    """Return the statuses of the elements of a turn."""
    # Before the marks are read, because a runner that ends in between has written its marks.
    alive = _is_alive(turn)
    return {element: _status(folder, element, alive) for element in turn.elements}


def _status(folder: Path, element: int, alive: bool) -> ElementStatus:
    code = exit_code(folder, element)
    start, elapsed = _times(folder, element)
    if code == 0:
        return ElementStatus(element, State.COMPLETED, "", start, elapsed, 0)
    if marked(folder, "cancelled", element):
        return ElementStatus(element, State.CANCELLED, "", start, elapsed)
    if code is not None:
        failed = ElementStatus(element, State.FAILED, "", start, elapsed, code)
        return stopped_early(failed, progress_of(folder, element))
    if not alive:
        return ElementStatus(
            element, State.LOST, tr("the process that submitted it has ended"), start, elapsed
        )
    if marked(folder, "begun", element):
        return ElementStatus(element, State.RUNNING, "", start, elapsed)
    return ElementStatus(element, State.PENDING, tr("waits for earlier jobs or elements"))


def _times(folder: Path, element: int) -> tuple[str, str]:
    """Return the start and the run time of an element, in SLURM's formats."""
    try:
        began = (folder / "begun" / str(element)).stat().st_mtime
    except OSError:
        return "", ""
    try:
        ended = (folder / "ends" / str(element)).lstat().st_mtime
    except OSError:
        ended = time.time()
    seconds = max(0, int(ended - began))
    return time.strftime(
        "%Y-%m-%dT%H:%M:%S", time.localtime(began)
    ), f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _is_alive(turn: Turn) -> bool:
    _runners[:] = [runner for runner in _runners if runner.poll() is None]  # reap runners that have ended
    return start_time(turn.number) == turn.born != 0
