"""SLURM's commands, with their answers as values. Only this module calls them.

All queries are for a whole job, because every query costs the controller of a large machine time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dlo_lib.cluster.states import ElementStatus, of_slurm
from dlo_lib.errors import UserError
from dlo_lib.text import tr

_ANSWER_S = 60
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


class NoAnswer(UserError):
    """SLURM's controller is busy or down; it may answer later."""


def is_available() -> bool:
    """Whether this machine belongs to a SLURM cluster, even if its controller is down.

    The commands alone are not enough, because they may be installed on any machine.
    """
    return (
        shutil.which("sbatch") is not None and "configuration source" not in _call("scontrol", "ping").stderr
    )


def submit(script: Path, *options: str) -> int:
    """Submit ``script``; return the number of the job.

    Raises:
        UserError: SLURM refuses it; the message is SLURM's.
    """
    done = _call("sbatch", "--parsable", *options, str(script))
    if done.returncode:
        raise UserError(tr("SLURM refuses the job: {why}", why=_error_text(done)))
    return int(done.stdout.strip().split(";")[0])


def check(script: Path, *options: str) -> None:
    """Check whether SLURM would accept ``script``, without submitting it.

    Raises:
        UserError: SLURM would refuse it.
    """
    done = _call("sbatch", "--test-only", *options, str(script))
    if done.returncode:
        raise UserError(tr("SLURM would refuse the job: {why}", why=_error_text(done)))


def named(name: str) -> int | None:
    """Return the number of the user's waiting or running job with this name; None if there is none."""
    done = _call("squeue", "-h", "--me", "-t", "pending,configuring,running", f"--name={name}", "-o", "%F")
    numbers = [int(number) for number in done.stdout.split()] if done.returncode == 0 else []
    return max(numbers, default=None)


def queue(job: int) -> dict[int, ElementStatus]:
    """Return the statuses of the job's elements in the queue; it drops elements some time after their end."""
    done = _call("squeue", "-h", "-r", "-t", "all", "-j", str(job), "-o", "%K|%T|%r|%S|%M")
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return {}
        raise NoAnswer(tr("squeue does not answer: {why}", why=_error_text(done)))
    found = {}
    for line in done.stdout.splitlines():
        index, state, reason, start, elapsed = line.split("|")
        element = int(index) if index.isdigit() else 0
        reason = "" if reason in ("None", "NonZeroExitCode") else reason  # the state says the same
        found[element] = ElementStatus(
            element, of_slurm(state), reason, "" if start == "N/A" else start, elapsed
        )
    return found


def history(job: int) -> dict[int, ElementStatus]:
    """Return the statuses of ended elements in the accounting; empty if there is no accounting."""
    if shutil.which("sacct") is None:
        return {}
    done = _call("sacct", "-nPX", "-j", str(job), "-o", "JobID,State,ExitCode,Start,Elapsed")
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, state, code, start, elapsed = line.split("|")
        index = re.fullmatch(r"\d+(?:_(\d+))?", name)
        if index is not None and of_slurm(state).over:
            element = int(index[1] or 0)
            found[element] = ElementStatus(
                element, of_slurm(state), "", start, elapsed, int(code.split(":")[0])
            )
    return found


def expected_starts(job: int) -> dict[int, str]:
    """Return the expected start times of waiting elements, as far as the scheduler has planned them."""
    done = _call("squeue", "-h", "-r", "--start", "-j", str(job), "-o", "%K|%S")
    rows = (line.split("|") for line in done.stdout.splitlines()) if done.returncode == 0 else ()
    return {int(index) if index.isdigit() else 0: start for index, start in rows if start != "N/A"}


def cancel(job: int, elements: Sequence[int] | None = None) -> None:
    """Cancel the job, or some elements of its array; elements that have ended do not change."""
    names = [str(job)] if elements is None else [f"{job}_{element}" for element in elements]
    _call("scancel", *names)


def requeue(job: int, element: int | None = None) -> None:
    """Put a job, or one element of its array, back into the queue; a running one is stopped.

    Raises:
        UserError: SLURM refuses.
    """
    done = _call("scontrol", "requeue", str(job) if element is None else f"{job}_{element}")
    if done.returncode:
        raise UserError(tr("SLURM does not requeue the job: {why}", why=_error_text(done)))


def accounts() -> tuple[str, ...]:
    """Return the accounts that the user may use; empty if there is no accounting."""
    if shutil.which("sacctmgr") is None:
        return ()
    user = _call("id", "-un").stdout.strip()
    done = _call("sacctmgr", "-nP", "show", "assoc", "where", f"user={user}", "format=account")
    return tuple(dict.fromkeys(done.stdout.split())) if done.returncode == 0 else ()


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the SLURM variables of a surrounding job, which would act as options."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(("SLURM_", "SBATCH_"))
    }
    environment = inherited | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, env=environment)
    except FileNotFoundError as error:
        raise UserError(
            tr("no {program} here: SLURM's commands are on the login nodes of a cluster", program=command[0])
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(
            tr(
                "{program} has not answered for {seconds} s: try again later",
                program=command[0],
                seconds=_ANSWER_S,
            )
        ) from error


def _error_text(done: subprocess.CompletedProcess[str]) -> str:
    lines = [re.sub(r"^\w+: (?:error: )?", "", line) for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or tr("status {status}", status=done.returncode)
