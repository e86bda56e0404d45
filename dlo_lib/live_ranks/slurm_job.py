"""A running job of SLURM as ranks of a notebook use it: its nodes, GPUs and tasks, or why it is of no use."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

_CAUSES = {
    "TIME LIMIT": "job {job} has reached its time limit, and its ranks have ended with it: submit a longer "
    "job, and give its number to --job",
    "PREEMPTION": "job {job} was pre-empted by another job, and its ranks have ended with it: wait until it "
    "runs again, or submit another job",
    "NODE FAILURE": "a node of job {job} has failed, and its ranks have ended with it: submit another job, "
    "and give its number to --job",
}
_COMPLETES_S, _POLL_S = 10.0, 0.5  # SLURM says how a job has ended when its nodes are free
_NUMBER = re.compile(r"\d+(_\d+)?")


@dataclass(frozen=True)
class RunningJob:
    """A job of this user that runs. ``number`` may be an element of an array, as in 1234_0."""

    number: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    tasks_per_node: int

    def ranks(self, wanted: int | None) -> int:
        """Return the number of ranks: ``wanted``, or one for each GPU of the job, or for each task if it has
        no GPU.

        Raises:
            UserError: the nodes cannot share the ranks evenly.
        """
        nodes = len(self.nodes)
        if wanted is None:
            return nodes * (self.gpus_per_node or self.tasks_per_node)
        if wanted % nodes:
            said = "{ranks} ranks cannot be shared evenly by the {nodes} nodes of job {job}: use {fits}"
            fits = max(nodes, wanted // nodes * nodes)
            raise UserError(tr(said, ranks=wanted, nodes=nodes, job=self.number, fits=fits))
        return wanted


def running_job(number: str) -> RunningJob:
    """Return the job of this user with this number.

    Raises:
        UserError: there is no such job, it is another user's, or it does not run.
    """
    from dlo_lib.cluster.run import pending
    from dlo_lib.cluster.slurm import commands

    if not _NUMBER.fullmatch(number):
        raise UserError(tr("--job {number}: give the number of a job, such as 1234 or 1234_0", number=number))
    found = commands.details(number)
    if not found:
        raise UserError(tr("SLURM knows no job {job}: squeue --me lists your jobs", job=number))
    if len(found) > 1:
        said = "job {job} has several parts: give the number of one, such as {job}_{element}"
        raise UserError(tr(said, job=number, element=found[0].element or 0))
    (one,) = found
    if one.user_id != os.getuid():
        said = "job {job} belongs to {user}: give the number of one of yours, which squeue --me lists"
        raise UserError(tr(said, job=number, user=one.user))
    if one.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        said = "job {job} has not started{why}: run the cell again when it runs, which squeue --me shows"
        why = pending.explain(one.reason).rstrip(".")
        raise UserError(tr(said, job=number, why=f" ({why})" if why else ""))
    if one.state != "RUNNING":
        raise UserError(_ended(number, one.state, one.reason))
    return RunningJob(number, commands.node_names(one.nodes), one.gpus_per_node, one.tasks_per_node)


def step_environment() -> dict[str, str]:
    """Return the environment of srun: this process's, without variables that would act as options."""
    from dlo_lib.cluster.slurm import commands

    return {k: v for k, v in commands.submission_environment().items() if not k.startswith("SRUN_")}


def why_ended(job: RunningJob, said: str) -> str:
    """Return a sentence on why a step of the job has ended; "" if the job still runs.

    Args:
        said: what SLURM wrote to the step's stderr.
    """
    from dlo_lib.cluster.slurm import commands

    if found := re.search(r"CANCELLED AT \S+ DUE TO ([A-Z ]+)", said):
        for cause, sentence in _CAUSES.items():
            if cause in found[1]:
                return tr(sentence, job=job.number)
    if "Access/permission denied" in said:
        return tr("SLURM does not let you start ranks in job {job}: is it yours?", job=job.number)
    until = time.monotonic() + _COMPLETES_S
    try:
        while (records := commands.details(job.number)) and records[0].state == "COMPLETING":
            if records[0].reason == "TimeLimit" or time.monotonic() > until:
                break
            time.sleep(_POLL_S)
    except UserError:
        return ""  # the controller does not answer: srun's own words are left
    if records and records[0].state == "RUNNING":
        return ""
    return _ended(job.number, *((records[0].state, records[0].reason) if records else ("", "")))


def _ended(number: str, state: str, reason: str) -> str:
    if state == "TIMEOUT" or reason == "TimeLimit":
        return tr(_CAUSES["TIME LIMIT"], job=number)
    how = "" if state == "COMPLETING" else state.lower().replace("_", " ")
    if state == "SUSPENDED":
        return tr("job {job} is suspended: run the cell again when it runs", job=number)
    said = "job {job} has ended{how}: submit another one, and give its number to --job"
    return tr(said, job=number, how=f" ({how})" if how else "")
