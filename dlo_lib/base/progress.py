"""How far a run is: one line in the file ``$DLO_PROGRESS``, which job scripts and the states of jobs read.

    49 400 stopped

says that a checkpoint holds step 49 of 400, and that the run has stopped early. A job script that SLURM did
not requeue adds the word ``refused``. The file exists from the
moment when the run can be asked to stop: a job script holds SLURM's signal until then. A job that is
requeued without progress in this number several times ends (``cluster/script/templates/job.sh.j2``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.files import write_text

VARIABLE = "DLO_PROGRESS"
DECIDES = "DLO_PROGRESS_DECIDES"
"""Set in the script of a program that can stop: the script reads from the progress whether it has stopped."""
_STOPPED, _REFUSED = "stopped", "refused"


@dataclass(frozen=True)
class RunProgress:
    """The newest checkpoint has the state after ``step`` of ``steps``; ``stopped``: the run ended there;
    ``refused``: SLURM did not put it back into the queue."""

    step: int
    steps: int
    stopped: bool = False
    refused: bool = False


def report(step: int, steps: int, stopped: bool = False) -> None:
    """Record the progress of this run in ``$DLO_PROGRESS``; do nothing outside a job. One rank calls it: at
    the start, after each checkpoint, and before it ends early (``stopped``).

    Raises:
        UserError: the disk is full.
    """
    if path := os.environ.get(VARIABLE):
        write_text(path, f"{step} {steps}{f' {_STOPPED}' if stopped else ''}\n")


def read(path: Path) -> RunProgress | None:
    """Return the progress in a file; None if the run has not recorded any."""
    try:
        step, steps, *rest = path.read_text(encoding="utf-8").split()
        return RunProgress(int(step), int(steps), _STOPPED in rest, _REFUSED in rest)
    except (OSError, ValueError):
        return None
