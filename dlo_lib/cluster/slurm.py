"""SLURM's commands, with their answers as values. Only this module calls them.

Every query costs the controller of a large machine time, so one query of the queue, at most every 5 s, serves
all jobs of the user and all processes that watch them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dlo_lib.cluster.snapshot import Snapshot
from dlo_lib.cluster.states import ElementStatus, of_slurm
from dlo_lib.cluster.user_environment import for_script
from dlo_lib.errors import UserError
from dlo_lib.text import tr

_ANSWER_S = 60
_QUERY_S = 5.0
_NOT_NAMED_YET = "allocation"  # in the accounting, for a moment
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_OF_A_RANK = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|TMPDIR|OMP_NUM_THREADS|DLO_(JOB|ELEMENT|OUT|PROGRESS|RANKS|LAUNCHER))"
)


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
    done = _sbatch(script.read_text(encoding="utf-8"), "--parsable", *options, str(script))
    _queue().invalidate()
    if done.returncode:
        raise UserError(tr("SLURM refuses the job: {why}", why=_error_text(done)))
    return int(done.stdout.strip().split(";")[0])


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
        return "", _error_text(done)
    start = re.search(r"to start at (\S+)", done.stderr + done.stdout)
    return (start[1].replace("T", " ") if start else ""), ""


def named(name: str, script: Path) -> int | None:
    """Return the number of the user's waiting or running job with this name and this script; None if there is
    none. A job of the same name from another state folder has another script.
    """
    states = "pending,configuring,running"
    done = _call("squeue", "-h", "--me", "-t", states, f"--name={name}", "-o", "%F|%o")
    rows = (line.split("|", 1) for line in done.stdout.splitlines()) if done.returncode == 0 else ()
    return max((int(number) for number, command in rows if command == str(script)), default=None)


@cache
def _cluster_of(configuration: str) -> str:
    done = _call("scontrol", "show", "config")
    found = re.search(r"^ClusterName\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    if found is None:
        raise NoAnswer(tr("scontrol does not answer: {why}", why=_error_text(done)))
    return found[1]


def cluster_name() -> str:
    """Return the name of the cluster that the commands of this machine talk to.

    Raises:
        NoAnswer: the controller does not answer.
    """
    return _cluster_of(_configuration())


def _configuration() -> str:
    return ":".join(os.environ.get(name, "") for name in _KEPT)


def _queue() -> Snapshot:
    return Snapshot(f"squeue-{cluster_name()}", lambda: float(os.environ.get("DLO_POLL_S") or _QUERY_S))


def _my_jobs() -> str:
    done = _call("squeue", "-h", "-r", "--me", "-t", "all", "-o", "%F|%K|%T|%r|%S|%M|%j")
    if done.returncode:
        raise NoAnswer(tr("squeue does not answer: {why}", why=_error_text(done)))
    return done.stdout


def queue(job: int, name: str = "") -> dict[int, ElementStatus]:
    """Return the statuses of the job's elements in the queue; it drops elements some time after their end.

    A waiting element has its expected start, as far as the scheduler has planned it.

    Args:
        name: the name of the job. A job with this number and another name is not this job, because numbers
            are used again.
    """
    found = _elements(_queue().read(_my_jobs), job, name)
    # A job that the last answer lacks may be newer than it.
    return found or _elements(_queue().read(_my_jobs, fresh=True), job, name)


def _elements(answer: str, job: int, name: str) -> dict[int, ElementStatus]:
    found = {}
    for line in answer.splitlines():
        number, index, state, reason, start, elapsed, called = line.split("|", 6)
        if int(number) != job or called != (name or called):
            continue
        element = int(index) if index.isdigit() else 0
        reason = "" if reason in ("None", "NonZeroExitCode") else reason  # the state says the same
        found[element] = ElementStatus(
            element, of_slurm(state), reason, "" if start == "N/A" else start, elapsed
        )
    return found


def history(job: int, name: str = "") -> dict[int, ElementStatus]:
    """Return the statuses of ended elements in the accounting; empty if there is no accounting.

    Args:
        name: the name of the job; a job with this number and another name is not this job.
    """
    if shutil.which("sacct") is None:
        return {}
    done = _call("sacct", "-nPX", "-j", str(job), "-o", "JobID,State,ExitCode,Start,Elapsed,JobName")
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        identity, state, code, start, elapsed, called = line.split("|", 5)
        index = re.fullmatch(r"\d+(?:_(\d+))?", identity)
        if index is not None and of_slurm(state).over and called in (name or called, _NOT_NAMED_YET):
            element = int(index[1] or 0)
            found[element] = ElementStatus(
                element, of_slurm(state), "", start, elapsed, int(code.split(":")[0])
            )
    return found


def used(jobs: Sequence[int], name: str = "") -> list[tuple[str, float, float]]:
    """Return what jobs and their steps have used: number, elapsed seconds, joules (0 where not measured).

    Every turn of a requeued job is counted. Empty if there is no accounting.

    Args:
        name: the name of the jobs; a job with one of the numbers and another name is not counted.
    """
    if shutil.which("sacct") is None:
        return []
    fields = "JobID,ElapsedRaw,ConsumedEnergyRaw,JobName"
    done = _call("sacct", "-nP", "--duplicates", "-j", ",".join(map(str, jobs)), "-o", fields)
    rows, counts = [], False
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        identity, elapsed, joules, called = line.split("|", 3)
        if "." not in identity:  # the rows of its steps, which have other names, follow
            counts = called in (name or called, _NOT_NAMED_YET)
        if counts and "[" not in identity:  # elements that have not begun
            rows.append((identity, float(elapsed or 0), _joules(joules)))
    return rows


@dataclass(frozen=True)
class JobDetails:
    """What the controller knows of a job, or of an element of an array.

    Attributes:
        element: in its array; None if it is none.
        state: in SLURM's words.
        nodes: in SLURM's short form.
        gpus_per_node: the least number on a node.
    """

    element: int | None
    user: str
    user_id: int
    state: str
    reason: str
    nodes: str
    gpus_per_node: int
    tasks_per_node: int


def details(job: str) -> list[JobDetails]:
    """Return what the controller knows of a job of any user: one for each element of an array that it
    lists; empty if it knows no such job.

    Args:
        job: a number, or that of an element of an array, such as ``1234_0``.
    """
    done = _call("scontrol", "--oneliner", "--details", "show", "job", job)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise NoAnswer(tr("scontrol does not answer: {why}", why=_error_text(done)))
    return [_details(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]


def _details(line: str) -> JobDetails:
    def field(name: str) -> str:
        found = re.search(rf" {name}=(\S*)", line)
        return "" if found is None or found[1] == "(null)" else found[1]

    owner = re.search(r" UserId=([^ (]*)\((\d+)\) GroupId=", line)
    gpus = [
        sum(map(int, re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", on_node)))
        for on_node in re.findall(r" Nodes=\S+ CPU_IDs=\S* Mem=\S* GRES=(\S*)", line)
    ]
    nodes, tasks = (int(re.sub(r"\D.*", "", field(name)) or 0) for name in ("NumNodes", "NumTasks"))
    element = field("ArrayTaskId")
    return JobDetails(
        int(element) if element.isdigit() else None,
        owner[1] if owner else "",
        int(owner[2]) if owner else -1,
        field("JobState"),
        field("Reason"),
        field("NodeList"),
        min(gpus, default=0),
        max(1, tasks // max(1, nodes)),
    )


def node_names(nodes: str) -> tuple[str, ...]:
    """Return the names in a list of nodes in SLURM's short form, such as ``r1i0n[3-5]``."""
    done = _call("scontrol", "show", "hostnames", nodes)
    if done.returncode:
        raise NoAnswer(tr("scontrol does not answer: {why}", why=_error_text(done)))
    return tuple(done.stdout.split())


def _joules(text: str) -> float:
    """Return a measured energy; SLURM has 2^64 - 2 and similar numbers for nodes that do not measure it."""
    value = float(text or 0)
    return value if value < 2**62 else 0.0


def cancel(job: int, elements: Sequence[int] | None = None, name: str = "") -> None:
    """Cancel the job, or some elements of its array; elements that have ended do not change.

    Args:
        name: the name of the job; a job with this number and another name does not change.
    """
    names = [str(job)] if elements is None else [f"{job}_{element}" for element in elements]
    _call("scancel", "--me", *([f"--name={name}"] if name else []), *names)
    _queue().invalidate()


def requeue(job: int, element: int | None = None) -> None:
    """Put a job, or one element of its array, back into the queue; a running one is stopped.

    Raises:
        UserError: SLURM refuses.
    """
    done = _call("scontrol", "requeue", str(job) if element is None else f"{job}_{element}")
    _queue().invalidate()
    if done.returncode:
        raise UserError(tr("SLURM does not requeue the job: {why}", why=_error_text(done)))


@cache
def _accounts_of(configuration: str) -> tuple[str, ...]:
    if shutil.which("sacctmgr") is None:
        return ()
    user = _call("id", "-un").stdout.strip()
    done = _call("sacctmgr", "-nP", "show", "assoc", "where", f"user={user}", "format=account")
    return tuple(dict.fromkeys(done.stdout.split())) if done.returncode == 0 else ()


def accounts() -> tuple[str, ...]:
    """Return the accounts that the user may use; empty if there is no accounting."""
    return _accounts_of(_configuration())


def partitions() -> tuple[str, ...]:
    """Return the names of the cluster's partitions; empty if the controller does not answer."""
    done = _call("sinfo", "-h", "-a", "-o", "%R")
    return tuple(dict.fromkeys(done.stdout.split())) if done.returncode == 0 else ()


def submission_environment() -> dict[str, str]:
    """Return the environment that a job may inherit from this process.

    Left out are the SLURM variables of a surrounding job, which would act as options, and those that describe
    a rank, its threads or its temporary folder: with them, each rank of the new job would believe to be the
    rank of this process. Options of the user in ``SBATCH_*`` stay.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name.startswith("SLURM_") or _OF_A_RANK.fullmatch(name))
    }


def _sbatch(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run sbatch without the ``SBATCH_*`` of the user whose options the script sets."""
    return _call("sbatch", *words, inherited=for_script(submission_environment(), script))


def _call(*command: str, inherited: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(submission_environment() if inherited is None else inherited)
    environment |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
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
