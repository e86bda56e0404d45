"""How an element ended that SLURM's controller no longer knows.

The controller forgets jobs some minutes after their end. What is left: the exit status that the script
wrote, the accounting, and the output, where SLURM writes a line when it ends a job: ``*** JOB 13 ON v1
CANCELLED AT <time> [DUE TO <why>] ***``. A line about a step does not count, because ``srun`` ends a step
when a rank fails.

An element without an exit status has a verdict only when the accounting has answered. Without a row there,
the accounting may be behind: its state is unknown for some minutes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.cluster.run import array_parts, records, submissions
from dlo_lib.cluster.run.records import Turn
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.commands import JobMark
from dlo_lib.cluster.slurm.states import ElementStatus, State

TERMINATED = 128 + 15
"""Exit status of a script that SIGTERM has ended."""

SETTLED_S = 900.0
"""Seconds after which an end that the accounting does not have is not expected any more."""

_READ = 2**16  # bytes at the end of the output
_LINE = re.compile(r"\*\*\* JOB (\d*)\S* ON \S+ CANCELLED AT \S+?(?: DUE TO ([\w ]+?))? \*\*\*")
_WHY = {
    "TIME LIMIT": (State.TIMEOUT, "it reached its time limit"),
    "PREEMPTION": (State.LOST, "a job of higher priority took its nodes"),
    "NODE FAILURE": (State.LOST, "its node has failed"),
}


def of_forgotten(folder: Path, turn: Turn, mark: JobMark, missing: Sequence[int]) -> dict[int, ElementStatus]:
    """Return the statuses of elements that the controller does not know.

    Args:
        missing: the elements; that the controller does not know them is certain.
    """
    codes = {element: records.exit_code(folder, element) for element in missing}
    without = [element for element, code in codes.items() if code is None]
    found = {
        element: _of_script(folder, turn, element, code)
        for element, code in codes.items()
        if code is not None
    }
    if not without:
        return found
    try:
        known = array_parts.by_element(turn.first, commands.history(turn.number, mark))
        kept, why = commands.has_accounting(), ""
    except commands.NoAnswer as error:
        known, kept, why = {}, True, str(error)
    late = (kept and len(known.keys() & set(without)) < len(without)) and not _is_settled(folder, turn)
    for element in without:
        if element in known:
            found[element] = known[element]
        elif late:
            text = why or tr("SLURM no longer knows it, and its accounting does not have its end yet")
            found[element] = ElementStatus(element, State.UNKNOWN, text, is_final=False)
        else:
            told = of_output(folder, turn, element, None)
            text = "SLURM no longer knows it, and it left no exit status: its node failed, or it was killed"
            found[element] = told or ElementStatus(element, State.LOST, tr(text), is_final=not why)
    return found


def _of_script(folder: Path, turn: Turn, element: int, code: int) -> ElementStatus:
    told = of_output(folder, turn, element, code)
    return told or ElementStatus(element, State.FAILED if code else State.COMPLETED, exit_code=code)


def _is_settled(folder: Path, turn: Turn) -> bool:
    """Whether the controller has not known elements for so long that the accounting would have their ends."""
    since = folder / submissions.TURNS / turn.token / f"forgotten-{turn.number}"
    try:
        since.parent.mkdir(parents=True, exist_ok=True)
        if not since.exists():
            since.touch()
        return time.time() - since.stat().st_mtime >= SETTLED_S
    except OSError:
        return False  # a full or read-only disk: a later look decides


def of_output(folder: Path, turn: Turn, element: int, code: int | None) -> ElementStatus | None:
    """Return the status of an element that SLURM ended, None if its output does not tell.

    Args:
        code: exit status of its script, None if it was killed before it wrote one.
    """
    if code not in (None, TERMINATED):
        return None
    began = submissions.has_begun(folder, turn, element)
    text = tr("it never began, and SLURM no longer knows it: it was cancelled while it waited")
    if code is None and began is False:
        return ElementStatus(element, State.CANCELLED, text)
    try:
        with (folder / "logs" / f"{element}.out").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
            found = _LINE.findall(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return None if began else ElementStatus(element, State.CANCELLED, text)
    # The number of an element of an array is not smaller than that of the array.
    lines = [why for number, why in found if not number or int(number) >= turn.number]
    if not lines:
        return None
    state, why = _WHY.get(lines[-1], (State.CANCELLED, "scancel ended it, here or in a terminal"))
    return ElementStatus(element, state, tr(why), exit_code=code)
