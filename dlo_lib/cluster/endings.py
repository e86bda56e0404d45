"""How SLURM ended a job, from the job's output, where no accounting keeps it.

When SLURM ends a job, it writes a line to the output: ``*** JOB 13 ON v1 CANCELLED AT <time> [DUE TO <why>]
***``. A line about a step does not count, because ``srun`` ends a step when a rank fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlo_lib.cluster.states import ElementStatus, State
from dlo_lib.text import tr

TERMINATED = 128 + 15
"""Exit status of a script that SIGTERM has ended."""

_READ = 2**16  # bytes at the end of the output
_LINE = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+?(?: DUE TO ([\w ]+?))? \*\*\*")
_WHY = {
    "TIME LIMIT": (State.TIMEOUT, "it reached its time limit"),
    "PREEMPTION": (State.LOST, "a job of higher priority took its nodes"),
    "NODE FAILURE": (State.LOST, "its node has failed"),
}


def of_forgotten(log: Path, element: int, code: int | None) -> ElementStatus | None:
    """Return the status of an element that SLURM ended and no longer knows, None if its output does not tell.

    Args:
        log: its output; without one it never began.
        code: exit status of its script, None if it was killed before it wrote one.
    """
    if code not in (None, TERMINATED):
        return None
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
            lines = _LINE.findall(file.read().decode(errors="replace"))
    except FileNotFoundError:
        text = tr("it never began, and SLURM no longer knows it: it was cancelled while it waited")
        return ElementStatus(element, State.CANCELLED, text)
    if not lines:
        return None
    state, why = _WHY.get(lines[-1], (State.CANCELLED, "scancel ended it, here or in a terminal"))
    return ElementStatus(element, state, tr(why), exit_code=code)
