"""SLURM's accounting: how jobs ended, what they used, and the accounts of the user."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from functools import cache

from dlo_lib.cluster.slurm import answers
from dlo_lib.cluster.slurm.answers import JobMark
from dlo_lib.cluster.slurm.invocation import asked, call, checked, config, configuration
from dlo_lib.cluster.slurm.states import ElementStatus

_CLOCKS_S = 3600.0
"""Seconds by which the clocks of this machine and of the controller may differ."""


def has_accounting() -> bool:
    """Whether SLURM keeps the ends of jobs, and this machine can ask for them.

    Raises:
        NoAnswer: the controller does not answer.
    """
    kept = config("AccountingStorageType")
    return shutil.which("sacct") is not None and kept not in ("", "(null)", "accounting_storage/none")


def history(job: int, mark: JobMark | None = None) -> dict[int, ElementStatus]:
    """Return the statuses of ended elements in the accounting; empty if there is no accounting.

    Args:
        mark: a job with this number that does not have it is not this job.

    Raises:
        NoAnswer: the accounting does not answer.
    """
    if not has_accounting():
        return {}
    words = ("-nPX", "-j", str(job), "-o", answers.HISTORY_FIELDS)
    return answers.of_accounting(checked(asked("sacct", *words), may_be_empty=True), mark)


def number_of_command(end: str, since: float) -> int:
    """Return the number of the user's newest job whose sbatch command ends with ``end``; 0 if there is none.

    Args:
        since: a time before its submission, in seconds since 1970.

    Raises:
        NoAnswer: the accounting does not answer.
    """
    if not has_accounting():
        return 0
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - _CLOCKS_S))
    done = asked("sacct", "-nPX", "-S", begin, "-o", "JobID,SubmitLine")
    if "Invalid field requested" in done.stderr:  # before SLURM 20.11
        return 0
    rows = (line.partition("|") for line in checked(done, may_be_empty=True).splitlines())
    found = [re.match(r"\d+", number) for number, _, command in rows if command.endswith(end)]
    return max((int(one[0]) for one in found if one is not None), default=0)


def used(jobs: Sequence[int], mark: JobMark | None = None) -> list[tuple[str, float, float]]:
    """Return what jobs and their steps have used: number, elapsed seconds, joules (0 where not measured).

    Every turn of a requeued job is counted. Empty if there is no accounting.

    Args:
        mark: a job with one of the numbers that does not have it is not counted.

    Raises:
        NoAnswer: the accounting does not answer.
    """
    if not has_accounting():
        return []
    fields = "JobID,ElapsedRaw,ConsumedEnergyRaw,Comment,JobName"
    answer = asked("sacct", "-nP", "--duplicates", "-j", ",".join(map(str, jobs)), "-o", fields)
    rows, counts = [], False
    for line in checked(answer, may_be_empty=True).splitlines():
        identity, elapsed, joules, called = line.split("|", 3)
        if "." not in identity:  # the rows of its steps, which have other names, follow
            counts = answers.is_ours(called, mark)
        if counts and "[" not in identity:  # elements that have not begun
            rows.append((identity, float(elapsed or 0), _joules(joules)))
    return rows


def _joules(text: str) -> float:
    """Return a measured energy; SLURM has 2^64 - 2 and similar numbers for nodes that do not measure it."""
    value = float(text or 0)
    return value if value < 2**62 else 0.0


@cache
def _accounts_of(_: str) -> tuple[str, ...]:
    if shutil.which("sacctmgr") is None or not has_accounting():
        return ()
    user = checked(call("id", "-un")).strip()
    done = asked("sacctmgr", "-nP", "show", "assoc", "where", f"user={user}", "format=account")
    return tuple(dict.fromkeys(checked(done).split()))


def accounts() -> tuple[str, ...]:
    """Return the accounts that the user may use; empty if there is no accounting.

    Raises:
        NoAnswer: the accounting does not answer, or knows no account of the user.
    """
    return _accounts_of(configuration())
