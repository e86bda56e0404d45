"""Failures of a job's ranks: one file for each rank that failed, in a folder that all nodes of the job see.

    $DLO_RANKS/<run>/failure-1.json     {"rank": 1, "at": 1764055000.2, "host": "r1i0n3", "headline": "raised
                                        ValueError: a bad batch", "traceback": "...", "is_consequence": false}
    $DLO_RANKS/<run>/verdict.json       the explanation of a deadlock, and the time at which it was found

One failing rank makes the others fail: their collectives break. So a rank also records whether its error only
reports broken communication. ``$DLO_RANKS`` is set by the scripts of jobs, and the states of jobs read the
folder (``cluster.causes``). ``<run>`` is one start of the ranks. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text

VARIABLE = "DLO_RANKS"
_KEPT_DAYS = 30
_FAILURE, _VERDICT = "failure-{rank}.json", "verdict.json"


@dataclass(frozen=True)
class FailureReport:
    """How one rank failed.

    Attributes:
        headline: ``raised ValueError: a bad batch``, ``was killed by SIGSEGV``.
        traceback: from the user's code on; "" if there is none.
        is_consequence: the error reports broken communication, so another rank is the cause.
        at: seconds since the epoch, by the clock of its node.
    """

    rank: int
    headline: str
    traceback: str = ""
    is_consequence: bool = False
    at: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)


def record_failure(folder: Path, report: FailureReport) -> None:
    """Write the report of a rank; a folder that cannot be written to costs the report only."""
    try:
        write_text(folder / _FAILURE.format(rank=report.rank), json.dumps(asdict(report)))
    except (OSError, UserError) as error:
        print(f"the failure of rank {report.rank} is not recorded in {folder}: {error}", flush=True)


def failures(folder: Path) -> list[FailureReport]:
    """Return the failures in the folder of one run: first the causes, then the consequences, each in the
    order of time.
    """
    found = [
        FailureReport(**values) for file in folder.glob(_FAILURE.format(rank="*")) for values in _read(file)
    ]
    return sorted(found, key=lambda report: (report.is_consequence, report.at))


def record_verdict(folder: Path, explanation: str) -> bool:
    """Record that the ranks can make no progress; return False if another process has recorded it before.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / _VERDICT).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"explanation": explanation, "at": time.time()}))
    except FileExistsError:
        return False
    return True


def verdict(folder: Path) -> str | None:
    """Return the explanation of a deadlock; None if there was none."""
    return next((values["explanation"] for values in _read(folder / _VERDICT)), None)


def forget_old_runs(folder: Path) -> None:
    """Remove the folders of runs that have not changed for ``_KEPT_DAYS`` days."""
    oldest = time.time() - _KEPT_DAYS * 24 * 3600
    for changed, run in _by_change(folder):
        if changed < oldest:
            shutil.rmtree(run, ignore_errors=True)  # another process may do the same


def runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in ``folder`` in the order of their last change."""
    return [run for _, run in _by_change(folder)]


def _by_change(folder: Path) -> list[tuple[float, Path]]:
    found = []
    for run in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            found.append((run.stat().st_mtime, run))
    return sorted((changed, run) for changed, run in found if run.is_dir())


def _read(file: Path) -> Iterator[dict]:
    """Yield the content of a file; nothing if there is none, or another program has damaged it."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(values, dict):
        yield values
