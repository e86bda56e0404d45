"""``submit``: one call is one job, or one array of jobs for a sweep.

The request is checked against the site, written as a script, and named by its content: the same call, in this
kernel or another, finds the existing job and submits nothing. SLURM runs the job; without SLURM this machine
does, one job after another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.job import login_node
from dlo_lib.cluster.job.announcement import announcement
from dlo_lib.cluster.job.handle import Job
from dlo_lib.cluster.job.preparation import PreparedCall, What, in_folder, prepare, write
from dlo_lib.cluster.run import dependency, records, submissions, turns
from dlo_lib.cluster.run.dependency import Dependency
from dlo_lib.cluster.script.template import WARNING_S, JobScript, Launcher
from dlo_lib.cluster.script.work import OnRanks, Sweep, combinations, name_of, refuse_requeue, work_of
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.site.request import allocate, make_request
from dlo_lib.cluster.site.sbatch_options import Options
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.states import State
from dlo_lib.cluster.view.views import local_time

_FUNCTION = OnRanks(("-m", "dlo_lib.cluster.code.function_rank"))


class Script(str):
    """A job script that was not submitted; a notebook shows its text."""

    def __repr__(self) -> str:
        return str(self)


def submit(
    what: What,
    given: Sequence[object] | Mapping[str, Any] = (),
    *,
    gpus: int | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    cores: int | None = None,
    memory: str = "",
    time: str | timedelta = "0:20:00",
    site: str | Path | None = None,
    account: str = "",
    qos: str = "",
    reservation: str = "",
    options: Options | None = None,
    setup: Sequence[str] = (),
    partition: str | Sequence[str] = "",
    env: Mapping[str, object] | None = None,
    srun: Options | None = None,
    sweep: Sweep | None = None,
    at_once: int | None = None,
    launcher: Launcher = Launcher.SRUN,
    requeue: bool = False,
    warning: int = WARNING_S,
    after: Job | None = None,
    after_kind: str = "afterok",
    name: str | None = None,
    copy_code: bool = True,
    dry_run: bool = False,
) -> Job | Script:
    """Submit a job, or find the one that the same call has submitted; return its handle at once.

    Args:
        what: a function (called on every rank, with a process group if there are several), a ``.py`` file or
            a module such as ``"dlo_lib.train"`` (run on every rank), a shell script or a command as a list
            (run once).
        given: arguments: a list of words, or settings, which become keywords of a function and ``--name
            value`` of a program.
        gpus: number on all nodes together, one rank each; 0: no GPU. None: 1, or 0 if ``ranks`` is given or
            the site has no GPUs.
        ranks: number of ranks without GPUs on all nodes together; None: one process.
        nodes: None: as few as hold the GPUs or the ranks.
        cores: cores of a rank; None: the share of one GPU.
        memory: memory of a node, such as ``"64G"``; "": the default of the partition.
        time: limit of each job: hours:minutes:seconds, or minutes.
        site: a name or a TOML file (``slurm/SITES.md``); None: ``$DLO_SITE``, or this machine without SLURM.
        account: with or without the site's suffix; "": ``$DLO_ACCOUNT``, the site's variable, or SLURM's
            default.
        qos: quality of service; "": the site's first one.
        reservation: nodes reserved for a course; "": the site's value.
        options: further options of sbatch: ``{"mail-type": "END", "exclusive": True}``. They replace those of
            the site; None takes one out, also one that the job sets and the centre refuses:
            ``{"cpus-per-task": None}``.
        setup: lines of bash that run before the program.
        partition: where SLURM chooses nodes, one or several; "": the site's.
        env: environment variables of the job; they replace those of the site.
        srun: further options of srun, such as ``{"container-image": "..."}`` (``srun_options``); they replace
            those of the site.
        sweep: values to combine (``{"lr": [1e-3, 1e-4]}``) or a list of settings: an array with one element
            each.
        at_once: number of elements that may run at the same time; None: all.
        launcher: what starts the ranks of a node.
        requeue: a run that stops early with a checkpoint (exit status 75) goes back into the queue until it
            completes, or makes no progress five times. Training does so before the time limit; a program of
            yours declares that it handles the signal (``cluster.work.refuse_requeue``).
        warning: seconds before the limit at which the run receives a signal.
        after: start when this job has completed.
        after_kind: ``"afterany"``: when it has ended in any state; ``"aftercorr"``: each element of this
            sweep when the element of the other sweep with the same number has completed.
        name: name in the queue; None: derived from ``what``.
        copy_code: the job runs from a copy of the code, taken now (``code_copy``), so that a later edit does
            not change it. False: it runs the files as they are when it starts.
        dry_run: print the estimated cost, return the script, and submit nothing.

    Returns:
        The job, or its script with ``dry_run``.

    Raises:
        UserError: the site cannot provide the resources, SLURM refuses the job, a file or module does not
            exist, or a value cannot be sent to another process.
    """
    if not isinstance(launcher, Launcher):
        known = ", ".join(f"Launcher.{one.name}" for one in Launcher)
        raise UserError(tr("launcher={given!r}: use one of {known}", given=launcher, known=known))
    asked = {
        "gpus": gpus,
        "ranks": ranks,
        "nodes": nodes,
        "cores": cores,
        "memory": memory,
        "account": account,
        "qos": qos,
        "reservation": reservation,
        "options": {} if options is None else options,
        "setup": setup if isinstance(setup, str) else tuple(setup),
        "partition": partition if isinstance(partition, str) else ",".join(map(str, partition)),
        "env": {} if env is None else env,
        "srun": {} if srun is None else srun,
    }
    settings = combinations(sweep)
    work = _FUNCTION if callable(what) else work_of(what)
    if requeue:
        refuse_requeue(what, work)
    if after is not None:
        dependency.check(after_kind, len(settings), after.elements)
    wanted = login_node.wanted_site(site)
    allocation = allocate(wanted, make_request(time, elements=len(settings), **asked))
    if not dry_run:
        allocation = login_node.checked(allocation)
    prepared = prepare(
        JobScript(
            name=name or name_of(what),
            allocation=allocation,
            work=work,
            launcher=launcher,
            at_once=at_once,
            requeue=requeue,
            warning=warning,
            python=sys.executable,
        ),
        what,
        given,
        settings,
        "" if after is None else f"{after_kind}:{after.record.digest}",
        None if wanted.gpu is None else wanted.gpu.name,
        copy_code,
    )
    folder = records.jobs_dir() / prepared.digest[:16]
    if dry_run:
        script = in_folder(prepared, folder)
        print(announcement(script, work, after is None, dry_run=True))
        return Script(script.text())
    with records.locked(folder):
        return _submit_or_find(
            prepared, folder, None if after is None else Dependency(after.folder, after_kind)
        )


def _submit_or_find(prepared: PreparedCall, folder: Path, after: Dependency | None) -> Job:
    job = Job(folder)
    new = not records.exists(folder)
    if new:
        write(prepared, folder)
    elif job.record.scheduler is Scheduler.SLURM:
        _settle(job)
    if all(turn.given_up for turn in job.record.turns):
        if job.record.scheduler is Scheduler.SLURM:
            print(announcement(in_folder(prepared, folder), prepared.script.work, after is None))
        new = True
        _first_turn(job, after)
    elif job.record.scheduler is Scheduler.LOCAL:
        lost = tuple(status.element for status in job.look()[1] if status.state is State.LOST)
        if lost:  # they ended with the process that ran them, because there is no queue to keep them
            turns.start(folder, lost)
    if said := _said(job, new):
        print(said)
    return job


def _said(job: Job, new: bool) -> str:
    """Return the line on what a call did; "" if SLURM has not told it."""
    record = job.record
    if any(turn.is_unknown for turn in record.turns):
        return ""  # the submission has printed it
    called = record.queue_name
    if record.scheduler is Scheduler.SLURM:
        called = f"{record.numbers} ({called})"
    if new:
        return tr("submitted job {job}", job=called)
    return tr("found job {job}, submitted {when}", job=called, when=local_time(record.submitted))


def _settle(job: Job) -> None:
    """Find the submissions of a job that got no answer; give up those that SLURM does not have.

    Raises:
        NoAnswer: the queue does not answer, so a job may be there.
    """
    record = job.record
    if not record.turns:  # written by an older version, which recorded a submission after sbatch
        if number := submissions.number_of_script(job.folder):
            everything = tuple(range(job.elements))
            records.add_turn(job.folder, records.Turn(number, everything, cluster=commands.cluster_name()))
        return
    for turn in record.turns:
        if turn.is_unknown:
            try:
                records.replace_turn(job.folder, submissions.found_or_given_up(job.folder, turn))
            except commands.NoAnswer as error:
                text = (
                    "SLURM may have {job}, but does not answer ({why}): nothing is submitted, try again later"
                )
                raise commands.NoAnswer(tr(text, job=record.queue_name, why=error)) from error


def _first_turn(job: Job, after: Dependency | None) -> None:
    try:
        turns.start(job.folder, tuple(range(job.elements)), after)
    except UserError:
        if all(turn.given_up for turn in job.record.turns):
            records.forget(job.folder)  # nothing was submitted
        raise
