"""``submit``: one call is one job, or one array of jobs for a sweep.

What is asked for is checked against the site, put into a script, and named by its content: the same call finds the job that it made
before, in this kernel or another, and submits nothing. SLURM runs it; where there is none, this machine does, one after another.

submitit, which does much of this for functions, is not used: it submits anew at each call, and knows how a job is only from the
accounting, which a site may not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dlo_lib.cluster import records, shipped, slurm, turns
from dlo_lib.cluster.digest import digest
from dlo_lib.cluster.job import Job
from dlo_lib.cluster.request import Allocation, allocate, make_request
from dlo_lib.cluster.script import WARNING_S, JobScript, Launcher
from dlo_lib.cluster.site import Scheduler, Site, sites
from dlo_lib.cluster.site import site as find_site
from dlo_lib.cluster.states import State
from dlo_lib.cluster.work import OnRanks, Sweep, Work, arguments, combinations, name_of, options, work_of
from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.text import tr

What = str | Path | Sequence[str] | Callable[..., Any]
_FUNCTION = OnRanks(("-m", "dlo_lib.cluster.call"))


class Script(str):
    """A job script that was not submitted; a notebook shows it as it is."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Prepared:
    """A call, understood: its script without a folder, and what makes it this call and no other."""

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
        what: a function (called on every rank, with ``torch.distributed`` ready when there are several), a ``.py`` file or a module such as
            ``"dlo_lib.train"`` (run on every rank), a shell script or a command as a list (run once).
        given: arguments: a list of words, or settings, which a function takes as keywords and a program as ``--name value``.
        gpus: on all nodes together, one rank each; 0: one process without a GPU.
        nodes: None: as few as hold the GPUs.
        cores: of a rank; None: the share of one GPU.
        time: limit of each job: hours:minutes:seconds, or minutes.
        site: a name or a TOML file (``slurm/SITES.md``); None: ``$DLO_SITE``, and this machine where there is no SLURM.
        account: with or without the site's suffix; empty: ``$DLO_ACCOUNT``, the site's own variable, or SLURM's default.
        sweep: values to combine (``{"lr": [1e-3, 1e-4]}``) or a list of settings: an array with an element for each.
        at_once: elements that may run at the same time; None: all.
        requeue: at the time limit the run is told, stops with a checkpoint, and goes back into the queue until it is done.
        warning: seconds before the limit at which it is told.
        after: begin when this job has completed.
        name: what the queue shows; None: that of ``what``.
        dry_run: return the script, and submit nothing.

    Raises:
        UserError: the site cannot give it, SLURM refuses, there is no such file or module, or a value that cannot be sent.
    """
    asked = {"gpus": gpus, "nodes": nodes, "cores": cores, "account": account, "qos": qos, "reservation": reservation}
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
    with records.holding(folder):
        return _submit_or_find(prepared, folder, after)


def _submit_or_find(prepared: _Prepared, folder: Path, after: Job | None) -> Job:
    job = Job(folder)
    if not records.exists(folder):
        _leave(prepared, folder)
    if not job.record.turns:
        _first_turn(job, after)
    elif job.record.scheduler is Scheduler.LOCAL:
        lost = tuple(status.element for status in job.look()[1] if status.state is State.LOST)
        if lost:  # they ended with the process that ran them: there is no queue that would have kept them
            turns.start(folder, lost)
    return job


def _first_turn(job: Job, after: Job | None) -> None:
    everything = tuple(range(job.elements))
    number = slurm.named(job.name) if job.record.scheduler is Scheduler.SLURM else None
    if number is not None:  # whoever submitted it was ended before it could note the number
        records.add_turn(job.folder, records.Turn(number, everything))
        return
    try:
        turns.start(job.folder, everything, None if after is None else after.folder)
    except UserError:
        records.forget(job.folder)  # it was refused: there is no job
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
        call = shipped.pack(what, named, settings)
        content: list[object] = [what, named, settings]
        if len(settings) > 1:
            script = replace(script, elements=((),) * len(settings))
    else:
        words = arguments(given)
        if len(settings) > 1 and _names_out(words):
            raise UserError(tr("the elements of a sweep cannot share one --out: leave it out, and each has a folder of its own"))
        if script.work.trains:
            words += ("--resume",) * ("--resume" not in words)  # so that what is submitted again goes on
        script = replace(script, arguments=words, elements=tuple(map(options, settings)))
        content = [_bytes_of(script.work)]
    whole = digest([script.text(), str(Path.cwd()), None if after is None else after.record.digest, *content])
    return _Prepared(replace(script, name=f"{script.name}-{whole[: records.SHORT]}"), tuple(settings), call, whole, card)


def _bytes_of(work: Work) -> bytes:
    """What is run, when it is a file."""
    last = (work.program if isinstance(work, OnRanks) else work.command)[-1]
    return Path(last).read_bytes() if Path(last).is_file() else b""


def _in_folder(prepared: _Prepared, folder: Path) -> JobScript:
    script = replace(prepared.script, folder=folder)
    if script.work.trains and not any(_names_out(words) for words in (script.arguments, *script.elements)):
        script = replace(script, out='"$DLO_OUT"')
    return script


def _names_out(words: tuple[str, ...]) -> bool:
    return any(word == "--out" or word.startswith("--out=") for word in words)


def _leave(prepared: _Prepared, folder: Path) -> None:
    """Everything that the job needs in its folder; the record last, since with it the job exists."""
    script = _in_folder(prepared, folder)
    (folder / "logs").mkdir(exist_ok=True)
    if prepared.call is not None:
        shipped.leave(folder, prepared.call)
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
            settings=tuple({key: _plain(value) for key, value in settings.items()} for settings in prepared.settings),
            outs=tuple(str(_out(script, element, folder, number)) for number, element in enumerate(script.elements)),
            submitted=datetime.now(UTC).isoformat(timespec="microseconds"),
            card=prepared.card,
        ),
    )


def _out(script: JobScript, element: tuple[str, ...], folder: Path, number: int) -> Path:
    """Where an element leaves its metrics: what ``--out`` says, or its folder."""
    words = script.arguments + element
    told = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--out"]
    told += [word.removeprefix("--out=") for word in words if word.startswith("--out=")]
    return Path.cwd() / told[-1] if told else folder / "out" / str(number)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _site(wanted: str | Path | None) -> Site:
    chosen = wanted or os.environ.get("DLO_SITE")
    if chosen:
        return find_site(chosen)
    if not slurm.is_available():
        return find_site("local")
    raise UserError(tr("on which site? Say site=, or set DLO_SITE: {names}, or a TOML file of your own", names=", ".join(sites())))


def _checked(allocation: Allocation) -> Allocation:
    """What only this machine can tell: whether it has SLURM, whether the account is the user's, what its PyTorch can do.

    Raises:
        UserError: the site would refuse the job, or could not run it.
    """
    where = allocation.site
    if where.scheduler is Scheduler.LOCAL and slurm.is_available():
        print(tr("this machine has SLURM: on a login node run nothing long, say site= instead"))
        return _here(allocation)
    if not slurm.is_available():
        here = _here(allocation)
        print(
            tr(
                "no SLURM here: this machine runs it, one job after another, as long as this process lives ({ranks} of {of} ranks)",
                ranks=here.ranks,
                of=allocation.ranks,
            )
        )
        return here
    from dlo_lib.cluster.pytorch import check_pytorch

    for said in (check_pytorch(where) if allocation.gpus_per_node else "", _said_of_folder(where)):
        if said:
            print(said)
    mine = slurm.accounts() if allocation.account else ()
    if mine and allocation.account not in mine:
        said = tr('account "{account}" is not one of yours: use {mine}', account=allocation.account, mine=tr(" or ").join(mine))
        raise UserError(said)
    return allocation


def _said_of_folder(where: Site) -> str:
    """A warning when jobs are noted where the site has little room, as in most homes."""
    roomy = [Path(os.path.expandvars(folder)) for folder in (where.work, where.scratch) if folder]
    folder = records.jobs_dir().resolve()
    if not any(place.is_dir() for place in roomy) or any(folder.is_relative_to(place.resolve()) for place in roomy if place.is_dir()):
        return ""
    advice = "jobs leave their files in {folder}, where {site} may have little room: set DLO_HOME={work}/dlo"
    return tr(advice, folder=folder, site=where.name, work=where.work)


def _here(allocation: Allocation) -> Allocation:
    """The same on this machine, with no more ranks than it takes."""
    machine = find_site("local")
    return replace(allocation, site=machine, nodes=1, gpus_per_node=min(allocation.ranks, machine.gpus_per_node))
