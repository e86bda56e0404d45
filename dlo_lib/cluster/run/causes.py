"""Why an element of a job failed, from what its ranks have recorded (``dlo_lib.base.rank_failures``).

The output of a job has the errors of all ranks in the order in which they were printed. The cause is the
first one that is no consequence of another one.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from dlo_lib.base import rank_failures
from dlo_lib.base.rank_failures import FailureReport
from dlo_lib.base.text import shortened, tr
from dlo_lib.cluster.run import rank_output, records
from dlo_lib.cluster.slurm.states import ElementStatus, State

RANKS = "ranks"
_BY_SIGNAL = 128  # added to the number of a signal in an exit status
_OWN_FAILURES = (State.FAILED, State.OUT_OF_MEMORY)


def with_cause(folder: Path, status: ElementStatus) -> ElementStatus:
    """Return the status of an element of the job in ``folder``; the reason is the cause of its failure."""
    if status.state not in _OWN_FAILURES:
        return status
    dead_lock, reports = _recorded(folder, status.element)
    if dead_lock:
        return replace(status, reason=shortened(dead_lock.splitlines()[0]))
    if (not reports or reports[0].is_consequence) and (killed := _killed(folder, status)):
        return replace(status, reason=killed)
    if not reports:
        return status
    first = reports[0]
    return replace(status, reason=shortened(tr("rank {rank} {how}", rank=first.rank, how=first.headline)))


def _killed(folder: Path, status: ElementStatus) -> str:
    """Return which process of an element a signal has ended, which therefore has recorded nothing; "" if
    the exit status tells no signal.
    """
    code = status.exit_code or 0
    if code <= _BY_SIGNAL:
        return ""
    script = folder / records.SCRIPT
    names_ranks = not script.exists() or "torch.distributed.run" not in script.read_text(encoding="utf-8")
    told = rank_output.killed_rank(folder / "logs" / f"{status.element}.out", names_ranks)
    if told or status.reason or code - _BY_SIGNAL != signal.SIGKILL:
        return told
    return rank_output.killed_by(tr("a process of it"), signal.SIGKILL.name)


def account(folder: Path, status: ElementStatus) -> str:
    """Return the cause of the failure of an element in full: the traceback of the first rank that failed, or
    the table of a deadlock; "" if no rank has recorded one.
    """
    if status.state not in _OWN_FAILURES:
        return ""
    dead_lock, reports = _recorded(folder, status.element)
    if dead_lock or not reports:
        return dead_lock
    from dlo_lib.launch.failure import Ending, RankState, blame  # imports torch

    return str(
        blame(
            [
                RankState(
                    report.rank,
                    Ending.RAISED,
                    report.at,
                    headline=report.headline,
                    traceback=report.traceback,
                    is_consequence=report.is_consequence,
                )
                for report in reports
            ]
        )
    )


def _recorded(folder: Path, element: int) -> tuple[str, list[FailureReport]]:
    """Return the explanation of a deadlock, or the failures in order, of the last run that has any.

    A broken connection is a consequence of a deadlock.
    """
    for run in reversed(rank_failures.runs(folder / RANKS / str(element))):
        dead_lock, reports = rank_failures.verdict(run), rank_failures.failures(run)
        if dead_lock is not None and all(report.is_consequence for report in reports):
            return dead_lock, []
        if reports:
            return "", reports
    return "", []
