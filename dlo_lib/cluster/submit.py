"""``submit``: one call is one job, or one array of jobs for a sweep.

The request is checked against the site, written as a script, and named by its content: the same call, in this
kernel or another, finds the existing job and submits nothing. SLURM runs the job; without SLURM this machine
does, one job after another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dlo_lib.cluster import function_job, records, slurm, turns
from dlo_lib.cluster.digest import digest
from dlo_lib.cluster.job import Job
from dlo_lib.cluster.request import Allocation, allocate, make_request
from dlo_lib.cluster.script import WARNING_S, JobScript, Launcher
from dlo_lib.cluster.site import Scheduler, Site, site_names
from dlo_lib.cluster.site import site as find_site
from dlo_lib.cluster.states import State
from dlo_lib.cluster.work import OnRanks, Sweep, Work, arguments, combinations, name_of, options, work_of
from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.text import tr

What = str | Path | Sequence[str] | Callable[..., Any]
_FUNCTION = OnRanks(("-m", "dlo_lib.cluster.function_rank"))


class Script(str):
    """A job script that was not submitted; a notebook shows its text."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Prepared:
    """A checked call: its script without a folder, and the parts that identify it."""

    script: JobScript
    settings: tuple[dict[str, Any], ...]
    call: bytes | None
    digest: str
    card: str | None


def submit(
    what: What,
    given: Sequence[object] | Mapping[str, Any] = (),
    *,
    gpus: int = 1,
    nodes: int | None = None,
    cores: int | None = None,
    time: str | timedelta = "0:20:00",
    site: str | Path | None = None,
    account: str = "",
    qos: str = "",
    reservation: str = "",
    sweep: Sweep | None = None,
    at_once: int | None = None,
    launcher: Launcher = Launcher.SRUN,
    requeue: bool = False,
    warning: int = WARNING_S,
    after: Job | None = None,
    name: str | None = None,
    dry_run: bool = False,
) -> Job | Script:
    """Submit a job, or find the one that the same call has submitted; return its handle at once.

    Args:
        what: a function (called on every rank, with a process group if there are several), a ``.py`` file or
            a module such as ``"dlo_lib.train"`` (run on every rank), a shell script or a command as a list
            (run once).
        given: arguments: a list of words, or settings, which become keywords of a function and ``--name
            value`` of a program.
        gpus: number on all nodes together, one rank each; 0: one process without a GPU.
        nodes: None: as few as hold the GPUs.
        cores: cores of a rank; None: the share of one GPU.
        time: limit of each job: hours:minutes:seconds, or minutes.
        site: a name or a TOML file (``slurm/SITES.md``); None: ``$DLO_SITE``, or this machine without SLURM.
        account: with or without the site's suffix; "": ``$DLO_ACCOUNT``, the site's variable, or SLURM's
            default.
        qos: quality of service; "": the site's first one.
        reservation: nodes reserved for a course; "": the site's value.
        sweep: values to combine (``{"lr": [1e-3, 1e-4]}``) or a list of settings: an array with one element
            each.
        at_once: number of elements that may run at the same time; None: all.
        launcher: what starts the ranks of a node.
        requeue: before the time limit the run stops with a checkpoint and goes back into the queue until it
            completes.
        warning: seconds before the limit at which the run receives a signal.
        after: start when this job has completed.
        name: name in the queue; None: derived from ``what``.
        dry_run: return the script, and submit nothing.

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
        "nodes": nodes,
        "cores": cores,
        "account": account,
        "qos": qos,
        "reservation": reservation,
    }
    settings = combinations(sweep)
    wanted = _site(site)
    allocation = allocate(wanted, make_request(time, elements=len(settings), **asked))
    if not dry_run:
        allocation = _checked(allocation)
    prepared = _prepare(
        JobScript(
            name=name or name_of(what),
            allocation=allocation,
            work=_FUNCTION if callable(what) else work_of(what),
            launcher=launcher,
            at_once=at_once,
            requeue=requeue,
            warning=warning,
            python=sys.executable,
        ),
        what,
        given,
        settings,
        after,
        None if wanted.gpu is None else wanted.gpu.name,
    )
    folder = records.jobs_dir() / prepared.digest[:16]
    if dry_run:
        return Script(_in_folder(prepared, folder).text())
    with records.locked(folder):
        return _submit_or_find(prepared, folder, after)


def _submit_or_find(prepared: _Prepared, folder: Path, after: Job | None) -> Job:
    job = Job(folder)
    if not records.exists(folder):
        _write_job(prepared, folder)
    if not job.record.turns:
        _first_turn(job, after)
    elif job.record.scheduler is Scheduler.LOCAL:
        lost = tuple(status.element for status in job.look()[1] if status.state is State.LOST)
        if lost:  # they ended with the process that ran them, because there is no queue to keep them
            turns.start(folder, lost)
    return job


def _first_turn(job: Job, after: Job | None) -> None:
    everything = tuple(range(job.elements))
    of_slurm = job.record.scheduler is Scheduler.SLURM
    number = slurm.named(job.name, job.folder / records.SCRIPT) if of_slurm else None
    if number is not None:  # a process submitted it but ended before it recorded the number
        records.add_turn(job.folder, records.Turn(number, everything, cluster=slurm.cluster_name()))
        return
    try:
        turns.start(job.folder, everything, None if after is None else after.folder)
    except UserError:
        records.forget(job.folder)  # SLURM refused the job
        raise


def _prepare(
    script: JobScript,
    what: What,
    given: Sequence[object] | Mapping[str, Any],
    settings: list[dict[str, Any]],
    after: Job | None,
    card: str | None,
) -> _Prepared:
    call: bytes | None = None
    if callable(what):
        if given and not isinstance(given, Mapping):
            raise UserError(tr("a function takes its arguments by name: give a dict"))
        named = dict(given) if isinstance(given, Mapping) else {}
        call = function_job.pack(what, named, settings)
        content: list[object] = [what, named, settings]
        if len(settings) > 1:
            script = replace(script, elements=((),) * len(settings))
    else:
        words = arguments(given)
        if len(settings) > 1 and _names_out(words):
            raise UserError(
                tr(
                    "the elements of a sweep cannot share one --out: "
                    "leave it out, and each gets a separate folder"
                )
            )
        if script.work.trains:
            words += ("--resume",) * ("--resume" not in words)  # a resubmitted job resumes its training
        script = replace(script, arguments=words, elements=tuple(map(options, settings)))
        content = [_content_of(script.work)]
    whole = digest([script.text(), str(Path.cwd()), None if after is None else after.record.digest, *content])
    return _Prepared(
        replace(script, name=f"{script.name}-{whole[: records.SHORT]}"), tuple(settings), call, whole, card
    )


def _content_of(work: Work) -> bytes:
    """Return the content of the file that the job runs, or nothing if it runs no file."""
    last = (work.program if isinstance(work, OnRanks) else work.command)[-1]
    return Path(last).read_bytes() if Path(last).is_file() else b""


def _in_folder(prepared: _Prepared, folder: Path) -> JobScript:
    script = replace(prepared.script, folder=folder)
    if script.work.trains and not any(_names_out(words) for words in (script.arguments, *script.elements)):
        script = replace(script, out='"$DLO_OUT"')
    return script


def _names_out(words: tuple[str, ...]) -> bool:
    return any(word == "--out" or word.startswith("--out=") for word in words)


def _write_job(prepared: _Prepared, folder: Path) -> None:
    """Write the job's files to its folder, the record last, because it makes the job exist."""
    script = _in_folder(prepared, folder)
    (folder / "logs").mkdir(exist_ok=True)
    if prepared.call is not None:
        function_job.write(folder, prepared.call)
    write_text(folder / records.SCRIPT, script.text())
    allocation = script.allocation
    records.write(
        folder,
        records.Record(
            digest=prepared.digest,
            name=script.name.removesuffix(f"-{prepared.digest[: records.SHORT]}"),
            site=allocation.site.name,
            scheduler=allocation.site.scheduler,
            gpus=allocation.ranks if allocation.gpus_per_node else 0,
            settings=tuple(
                {key: _plain(value) for key, value in settings.items()} for settings in prepared.settings
            ),
            outs=tuple(
                str(_out(script, element, folder, number)) for number, element in enumerate(script.elements)
            ),
            submitted=datetime.now(UTC).isoformat(timespec="microseconds"),
            card=prepared.card,
        ),
    )


def _out(script: JobScript, element: tuple[str, ...], folder: Path, number: int) -> Path:
    """Return the folder of an element's metrics: the value of ``--out``, or the element's folder."""
    words = script.arguments + element
    named_out = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--out"]
    named_out += [word.removeprefix("--out=") for word in words if word.startswith("--out=")]
    return Path.cwd() / named_out[-1] if named_out else folder / "out" / str(number)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _site(wanted: str | Path | None) -> Site:
    chosen = wanted or os.environ.get("DLO_SITE")
    if chosen:
        return find_site(chosen)
    if not slurm.is_available():
        return find_site("local")
    raise UserError(
        tr(
            "which site? Set site= or DLO_SITE to one of {names}, or to a TOML file",
            names=", ".join(site_names()),
        )
    )


def _checked(allocation: Allocation) -> Allocation:
    """Check what only this machine knows: whether it has SLURM, the user's accounts, and its PyTorch.

    Raises:
        UserError: the site would refuse the job, or could not run it.
    """
    where = allocation.site
    if where.scheduler is Scheduler.LOCAL and slurm.is_available():
        print(tr("this machine has SLURM: do not run long jobs on a login node, set site= instead"))
        return _here(allocation)
    if not slurm.is_available():
        here = _here(allocation)
        print(
            tr(
                "no SLURM here: this machine runs the job while this process lives, "
                "one job after another ({ranks} of {of} ranks)",
                ranks=here.ranks,
                of=allocation.ranks,
            )
        )
        return here
    from dlo_lib.cluster.pytorch import check_pytorch

    for said in (check_pytorch(where) if allocation.gpus_per_node else "", _folder_warning(where)):
        if said:
            print(said)
    mine = slurm.accounts() if allocation.account else ()
    if mine and allocation.account not in mine:
        said = tr(
            'account "{account}" is not one of yours: use {mine}',
            account=allocation.account,
            mine=tr(" or ").join(mine),
        )
        raise UserError(said)
    return allocation


def _folder_warning(where: Site) -> str:
    """Return a warning if jobs are recorded where the site has little room, such as most home folders."""
    roomy = [Path(os.path.expandvars(folder)) for folder in (where.work, where.scratch) if folder]
    folder = records.jobs_dir().resolve()
    if not any(place.is_dir() for place in roomy) or any(
        folder.is_relative_to(place.resolve()) for place in roomy if place.is_dir()
    ):
        return ""
    advice = "jobs write their files to {folder}, where {site} may have little room: set DLO_HOME={work}/dlo"
    return tr(advice, folder=folder, site=where.name, work=where.work)


def _here(allocation: Allocation) -> Allocation:
    """Return the same resources on this machine, with no more ranks than it runs."""
    machine = find_site("local")
    return replace(
        allocation, site=machine, nodes=1, gpus_per_node=min(allocation.ranks, machine.gpus_per_node)
    )
