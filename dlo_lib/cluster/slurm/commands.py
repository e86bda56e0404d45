"""SLURM's commands, with their answers as values. Only this module calls them.

Every query costs the controller of a large machine time, so one query of the queue, at most every 5 s, serves
all jobs of the user and all processes that watch them. The status of every command counts: what SLURM has not
said raises :class:`NoAnswer`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.duration import parse_duration
from dlo_lib.cluster.site.user_environment import for_script
from dlo_lib.cluster.slurm import answers, invocation
from dlo_lib.cluster.slurm.accounting import accounts, has_accounting, history, number_of_command, used
from dlo_lib.cluster.slurm.answers import JobMark, QueueRow
from dlo_lib.cluster.slurm.details import JobDetails, details_of
from dlo_lib.cluster.slurm.invocation import (
    NoAnswer,
    asked,
    checked,
    cluster_name,
    config,
    error_text,
    not_answered,
    query_s,
    submission_environment,
)
from dlo_lib.cluster.slurm.snapshot import Snapshot
from dlo_lib.cluster.slurm.states import ElementStatus

__all__ = [
    "JobDetails",
    "JobMark",
    "NoAnswer",
    "Unsure",
    "accounts",
    "cancel",
    "changed",
    "cluster_name",
    "config",
    "controller",
    "details",
    "expected_start",
    "has_accounting",
    "history",
    "is_available",
    "longest_time",
    "my_rows",
    "node_names",
    "number_of_command",
    "partitions",
    "queue",
    "requeue",
    "submission_environment",
    "submit",
    "used",
]

_VERDICT = "Batch job submission failed: "
_CONNECTION = re.compile(
    r"timed out|unable to contact|connect failure|communication|zero bytes|transport endpoint|connection "
    r"|unexpected message|try again|temporarily|header lengths|slurm_receive_msg|insane message|i/o error",
    re.IGNORECASE,
)
"""Errors about the connection to the controller, which say nothing about what it has done."""
_NO_JOB, _IS_OVER = "Invalid job id", ("Invalid job id", "already completing or completed")


class Unsure(NoAnswer):
    """SLURM may have accepted a job.

    Attributes:
        has_ended: whether sbatch has ended with an error that is not about its connection to SLURM. Then a
            job that the queue does not have now was not accepted.
    """

    def __init__(self, why: str, has_ended: bool = False) -> None:
        super().__init__(why)
        self.has_ended = has_ended


def is_available() -> bool:
    """Whether this machine belongs to a SLURM cluster, even if its controller is down.

    The commands alone are not enough, because they may be installed on any machine.
    """
    if shutil.which("sbatch") is None:
        return False
    try:
        return "configuration source" not in asked("scontrol", "ping").stderr
    except NoAnswer:
        return True  # it has a controller to wait for


def submit(script: Path, *words: str, arguments: Sequence[str] = ()) -> tuple[int, str]:
    """Submit ``script``; return the number of the job and its cluster, "" if sbatch names none.

    Args:
        words: further options of sbatch; they replace those of the script.
        arguments: of the script.

    Raises:
        Unsure: SLURM may have accepted it.
        UserError: SLURM refuses it; the message is SLURM's.
    """
    head = script.read_text(encoding="utf-8") + "".join(f"\n#SBATCH {word}" for word in words)
    try:
        done = _sbatch(head, "--parsable", *words, str(script), *arguments)
    except NoAnswer as error:
        raise Unsure(str(error)) from error
    why = error_text(done)
    if done.returncode > 0 and _VERDICT in done.stderr and not _CONNECTION.search(why):
        raise UserError(tr("SLURM refuses the job: {why}", why=why.replace(_VERDICT, "")))
    found = re.match(r"(\d+)(?:;(\S+))?\s*$", done.stdout)
    if done.returncode or found is None:
        said = done.stderr.strip()
        raise Unsure(why, has_ended=done.returncode > 0 and bool(said) and not _CONNECTION.search(said))
    return int(found[1]), found[2] or ""


def expected_start(script: str) -> tuple[str, str]:
    """Return when the job of this script would start, in SLURM's format, and why SLURM would refuse it.

    Nothing is submitted, but the controller plans the job like any other, and the estimate takes one number
    of a job. Either text may be empty.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        done = _sbatch(script, "--test-only", file.name)
    if done.returncode:
        return "", error_text(done)
    start = re.search(r"to start at (\S+)", done.stderr + done.stdout)
    return (start[1].replace("T", " ") if start else ""), ""


def _sbatch(script: str, *words: str) -> CompletedProcess[str]:
    """Run sbatch without the ``SBATCH_*`` of the user whose options the script sets.

    The job inherits the environment of sbatch, where ``LC_ALL`` is C; its script restores the user's value.
    """
    environment = for_script(submission_environment(), script)
    environment["DLO_LC_ALL"] = environment.get("LC_ALL", "")
    return invocation.call("sbatch", *words, environment=environment)


def _queue() -> Snapshot:
    return Snapshot(f"squeue-{cluster_name()}", query_s)


def changed() -> None:
    """Make earlier answers of the queue invalid, because the user has changed it."""
    _queue().invalidate()


def _my_jobs() -> str:
    answer = asked("squeue", "-h", "-r", "--me", "-t", "all", "-o", answers.QUEUE_FORMAT)
    return checked(answer, may_be_empty=True)


def my_rows(fresh: bool = False) -> list[QueueRow]:
    """Return all elements of all jobs of the user in the queue.

    Args:
        fresh: the answer is newer than this call.
    """
    return list(answers.of_queue(_queue().read(_my_jobs, fresh=fresh)))


def queue(job: int, mark: JobMark | None = None) -> dict[int, ElementStatus]:
    """Return the statuses of the job's elements in the queue; it drops elements some time after their end.

    A waiting element has its expected start, as far as the scheduler has planned it.

    Args:
        mark: a job with this number that does not have it is not this job.
    """
    # A job that the last answer lacks may be newer than it.
    found = _of_job(my_rows(), job, mark) or _of_job(my_rows(fresh=True), job, mark)
    return {element: row.status() for element, row in found.items()}


def controller(job: int, mark: JobMark | None = None) -> dict[int, ElementStatus]:
    """Return the statuses of the elements that the controller knows, from a question about this job alone.

    ``squeue`` is silent for a user that it does not find; here the controller says that it knows no such job.
    """
    return {element: row.status() for element, row in _of_job(_asked_about(job), job, mark).items()}


def _asked_about(job: int) -> list[QueueRow]:
    return list(answers.of_controller(_show_job(str(job))))


def _show_job(job: str) -> str:
    """Return the controller's lines about a job; "" if it says that it knows none."""
    done = asked("scontrol", "--oneliner", "--details", "show", "job", job)
    if done.returncode and _NO_JOB in done.stderr:
        return ""
    return checked(done)


def _of_job(rows: Iterable[QueueRow], job: int, mark: JobMark | None) -> dict[int, QueueRow]:
    return {row.element: row for row in rows if row.number == job and (mark is None or mark.fits(row.called))}


def details(job: str) -> list[JobDetails]:
    """Return what the controller knows of a job of any user: one for each element of an array that it
    lists; empty if it knows no such job.

    Args:
        job: a number, or that of an element of an array, such as ``1234_0``.
    """
    return [details_of(line) for line in _show_job(job).splitlines() if line.startswith("JobId=")]


def node_names(nodes: str) -> tuple[str, ...]:
    """Return the names in a list of nodes in SLURM's short form, such as ``r1i0n[3-5]``."""
    return tuple(checked(asked("scontrol", "show", "hostnames", nodes)).split())


def cancel(job: int, elements: Sequence[int] | None = None, mark: JobMark | None = None) -> list[int]:
    """Cancel the job, or some elements of its array; elements that have ended do not change.

    Args:
        mark: a job with this number that does not have it does not change.

    Returns:
        The elements that are cancelled now and were not before.

    Raises:
        NoAnswer: the queue does not confirm that they are cancelled.
    """

    def rows() -> dict[int, QueueRow]:
        found = _of_job(_asked_about(job), job, mark)
        return {element: row for element, row in found.items() if elements is None or element in elements}

    invocation.ask_anew()
    before = [element for element, row in rows().items() if not row.is_ending]
    if not before:
        return []
    names = [str(job)] if elements is None else [f"{job}_{element}" for element in before]
    why = ""
    try:
        done = invocation.call("scancel", *names)  # with --me, it cancels whole arrays that wait
        if done.returncode and not any(text in done.stderr for text in _IS_OVER):
            why = str(not_answered(done))
    except NoAnswer as error:  # the queue shows whether it was done
        why = str(error)
    try:
        changed()
        after = rows()
    except NoAnswer as error:
        text = "scancel was called, but SLURM does not confirm it ({why}): look again later"
        raise NoAnswer(tr(text, why=why or error)) from error
    if any(not row.is_ending for row in after.values()):
        text = "job {job} is not cancelled ({why}): cancel it again later"
        raise NoAnswer(tr(text, job=job, why=why or tr("scancel did nothing")))
    return [element for element in before if element in after and after[element].is_cancelled]


def requeue(job: int, element: int | None = None) -> None:
    """Put a job, or one element of its array, back into the queue; a running one is stopped.

    Raises:
        NoAnswer: SLURM may have done it.
        UserError: SLURM refuses.
    """
    done = invocation.call("scontrol", "requeue", str(job) if element is None else f"{job}_{element}")
    changed()
    if done.returncode:
        if not done.stderr.strip() or _CONNECTION.search(done.stderr):
            raise not_answered(done)
        raise UserError(tr("SLURM does not requeue the job: {why}", why=error_text(done)))


def partitions() -> tuple[str, ...]:
    """Return the names of the cluster's partitions; empty if the controller does not answer."""
    try:
        return tuple(dict.fromkeys(checked(asked("sinfo", "-h", "-a", "-o", "%R")).split()))
    except NoAnswer:
        return ()


def longest_time(partitions: str) -> timedelta | None:
    """Return the longest time that one of the partitions allows; None if there is no limit, or no answer.

    Args:
        partitions: their names, with commas; "" for the default one, whose name ends with ``*`` in sinfo.
    """
    try:
        rows = checked(asked("sinfo", "-h", "-a", "-o", "%P|%l")).splitlines()
    except NoAnswer:
        return None
    limits = dict(row.split("|", 1) for row in rows)
    named = partitions.split(",") if partitions else [name[:-1] for name in limits if name.endswith("*")]
    found = [limits.get(name, limits.get(f"{name}*", "")) for name in named]
    if not found or any(not text[:1].isdigit() for text in found):  # "infinite"
        return None
    return max(parse_duration(text) for text in found)
