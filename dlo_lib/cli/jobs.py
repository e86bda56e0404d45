"""`dlo jobs`: list, show, cancel, resubmit and forget the submitted jobs, and print their logs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.text import tr

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


@jobs.callback()
def default(context: typer.Context) -> None:
    """Manage the jobs you submitted from a notebook. Without a command, list them, the newest last."""
    if context.invoked_subcommand is None:
        list_jobs()


@jobs.command("list")
def list_jobs(as_json: AsJson = False) -> None:
    """List all jobs with their states, and below them why a job has failed."""
    from dlo_lib.cluster import records
    from dlo_lib.cluster.job import jobs as submitted
    from dlo_lib.cluster.states import State, summary

    rows = []
    for job in submitted():
        statuses = job.status()
        failed = (one.reason for one in statuses if one.state is State.FAILED and one.reason)
        rows.append((job, job.record, summary(statuses), next(failed, "")))
    if as_json:
        shown = [
            {
                "job": record.digest[: records.SHORT],
                "name": job.name,
                "site": record.site,
                "gpus": record.gpus,
                "numbers": [turn.number for turn in record.turns],
                "submitted": record.submitted,
                "state": state,
                "reason": reason,
            }
            for job, record, state, reason in rows
        ]
        print(json.dumps(shown, indent=1))
        return
    if not rows:
        Console().print(
            tr("no jobs yet: submit one with dlo_lib.cluster.submit, see slurm/README.md"), soft_wrap=True
        )
        return
    table = Table("job", "name", "site", "GPUs", "number", "submitted (UTC)", "state")
    for _, record, state, _ in rows:
        numbers = ", ".join(str(turn.number) for turn in record.turns)
        when = record.submitted[:16].replace("T", " ")
        table.add_row(
            record.digest[: records.SHORT],
            escape(record.name),
            record.site,
            str(record.gpus),
            numbers,
            when,
            state,
        )
    Console().print(table)
    for _, record, _, reason in rows:
        if reason:
            line = tr("{job}: {reason}", job=record.digest[: records.SHORT], reason=reason)
            Console().print(escape(line), soft_wrap=True, highlight=False)


@jobs.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show the elements of a job, its folder and its submitted script."""
    from dlo_lib.cluster.job import job as find_job

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
    from dlo_lib.cluster.job import job as find_job

    job = find_job(name)
    was_over = job.done
    job.cancel(element)
    if element is not None and not was_over:
        print(tr("element {element} of {job} is cancelled", element=element, job=job.name))
        return
    print(
        tr("{job} has already ended: {state}", job=job.name, state=job.state)
        if was_over
        else tr("{job} is cancelled", job=job.name)
    )


@jobs.command()
def resubmit(name: Name) -> None:
    """Submit the elements of a job again that ended without completing; training resumes.

    Without SLURM, the command ends with the job, because the job runs on this machine.
    """
    from dlo_lib.cluster.job import job as find_job
    from dlo_lib.cluster.site import Scheduler
    from dlo_lib.cluster.waiting import JobFailed

    job = find_job(name).resubmit()
    turn = job.record.turns[-1]
    elements = ", ".join(map(str, turn.elements))
    print(
        tr(
            "{job} is submitted again, number {number}: elements {elements}",
            job=job.name,
            number=turn.number,
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
    from dlo_lib.cluster.job import job as find_job

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
) -> None:
    """Print the output of a job, or of one element of its sweep."""
    from dlo_lib.cluster.job import job as find_job

    job = find_job(name)
    if not follow:
        print(job.logs(element, lines), end="")
        return
    for piece in job.follow(element):
        print(piece, end="", flush=True)
