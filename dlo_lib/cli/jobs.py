"""`dlo jobs`: list, show, cancel, resubmit and forget the submitted jobs, and print their logs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

jobs = typer.Typer(
    help="The jobs you submitted: list, show, cancel, resubmit, forget, logs.",
    no_args_is_help=False,
    invoke_without_command=True,
)

Name = Annotated[
    str,
    typer.Argument(help="a job: the end of its name, its number at SLURM, or its name", show_default=False),
]
Element = Annotated[int, typer.Option("--element", "-e", help="the element of a sweep, from 0", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


States = Annotated[
    list[str] | None,
    typer.Option("--state", "-s", help="only jobs with an element in this state, such as failed; repeatable"),
]
Last = Annotated[int | None, typer.Option("--last", "-l", help="only the newest jobs, this number", min=1)]
Since = Annotated[
    str | None,
    typer.Option("--since", help="only jobs submitted since 2026-11-20, 2026-11-20T14:00, or for 12h, 7d"),
]


@jobs.callback()
def default(
    context: typer.Context,
    state: States = None,
    last: Last = None,
    since: Since = None,
    as_json: AsJson = False,
) -> None:
    """Manage the jobs you submitted from a notebook. Without a command, list them, the newest last."""
    if context.invoked_subcommand is None:
        list_jobs(state, last, since, as_json)


@jobs.command("list")
def list_jobs(state: States = None, last: Last = None, since: Since = None, as_json: AsJson = False) -> None:
    """List the jobs with their states, and below them why a job has failed or is not known.

    Jobs that have ended are listed when SLURM is down, too. Times are in the zone of this machine.
    """
    from dlo_lib.cli import jobs_table
    from dlo_lib.cluster.run import records

    chosen = jobs_table.chosen(jobs_table.states_of(state or []), last, jobs_table.start_of(since))
    for folder in records.damaged():
        try:
            records.read(folder)
        except UserError as error:
            print(error, file=sys.stderr)
    if as_json:
        print(json.dumps([row.plain() for row in chosen], indent=1))
    elif not chosen and (state or last or since):
        print(tr("no such job: leave out --state, --last and --since to list all"))
    elif not chosen:
        Console().print(
            tr("no jobs yet: submit one with dlo_lib.cluster.submit, see slurm/README.md"), soft_wrap=True
        )
    else:
        console = Console()
        console.print(jobs_table.table(chosen, console.width), highlight=False)
        for line in jobs_table.reasons(chosen):
            console.print(line, soft_wrap=True, highlight=False, markup=False)


@jobs.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show the elements of a job, its folder and its submitted script."""
    from dlo_lib.cluster.job.handle import job as find_job

    job = find_job(name)
    if as_json:
        print(
            json.dumps(
                [asdict(status) for status in job.status()], indent=1, default=lambda value: value.value
            )
        )
        return
    print(job)
    if (used := job.usage()) is not None:
        print(used)
    print(tr("files: {folder}", folder=job.folder))
    print(f"\n{job.script}")


@jobs.command()
def cancel(
    name: Name,
    element: Annotated[
        int | None, typer.Option("--element", "-e", help="only this element of a sweep, from 0", min=0)
    ] = None,
) -> None:
    """Cancel all running and pending elements of a job, or one of them."""
    from dlo_lib.cluster.job.handle import job as find_job

    job = find_job(name)
    cancelled = job.cancel(element)
    if not cancelled:
        if element is None:
            print(tr("{job} has already ended: {state}", job=job.name, state=job.state))
        else:
            text, state = "element {element} of {job} has already ended: {state}", job.status()[element].text
            print(tr(text, element=element, job=job.name, state=state))
    elif element is None:
        print(tr("{job} is cancelled", job=job.name))
    else:
        print(tr("element {element} of {job} is cancelled", element=element, job=job.name))


@jobs.command()
def resubmit(
    name: Name,
    time: Annotated[
        str | None, typer.Option(help="limit of this submission, for elements that reached theirs")
    ] = None,
    memory: Annotated[str, typer.Option(help="of a node, such as 64G, for elements that ran out of it")] = "",
) -> None:
    """Submit the elements of a job again that ended without completing; training resumes.

    Without SLURM, the command ends with the job, because the job runs on this machine.
    """
    from dlo_lib.cluster.job.handle import job as find_job
    from dlo_lib.cluster.run.waiting import JobFailed
    from dlo_lib.cluster.site.description import Scheduler

    job = find_job(name).resubmit(time, memory)
    turn = job.record.turns[-1]
    elements = ", ".join(map(str, turn.elements))
    print(
        tr(
            "{job} is submitted again, number {number}: elements {elements}",
            job=job.name,
            number=turn.number or "?",
            elements=elements,
        ),
        flush=True,
    )
    if job.record.scheduler is Scheduler.LOCAL:
        try:
            job.wait()
        except JobFailed as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from error


@jobs.command()
def forget(name: Name) -> None:
    """Remove the record and the files of a job that has ended; the same call then submits it again."""
    from dlo_lib.cluster.job.handle import job as find_job

    job = find_job(name)
    called, folder = job.name, job.folder
    job.forget()
    print(tr("{job} is forgotten, and its folder {folder} is removed", job=called, folder=folder))


@jobs.command()
def logs(
    name: Name,
    element: Element = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="follow the output until the job ends")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="print only the last lines", min=1)
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", "-r", help="print only this rank", min=0)] = None,
) -> None:
    """Print the output of a job, or of one element of its sweep."""
    from dlo_lib.cluster.job.handle import job as find_job

    job = find_job(name)
    if follow and (rank is not None or lines is not None):
        raise UserError(tr("--follow shows the whole output as it appears: leave out --rank and --lines"))
    if lines is not None or rank is not None:
        print(job.logs(element, lines, rank), end="")
        return
    for piece in job.follow(element) if follow else job.pieces(element):
        print(piece, end="", flush=follow)
