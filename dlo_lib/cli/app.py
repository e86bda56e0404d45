"""The commands of `dlo`. Each is a few lines: the work is done below, in the rooms that know it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dlo_lib.cli import course, jobs, make
from dlo_lib.cli.grade import grade
from dlo_lib.errors import UserError

app = typer.Typer(
    name="dlo",
    help="Optimised and distributed deep learning: the labs, their checks and their grading.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
INSTRUCTORS = "For instructors"
AUTHORS = "For authors of labs"

LabName = Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


@app.command()
def lab(
    port: Annotated[int | None, typer.Option(help="port of the server; the first free one from 8888 on", min=1, max=65535)] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="only print the URL")] = False,
) -> None:
    """Open JupyterLab on your own copy of the labs; it is made on first use, and your notebooks are never overwritten."""
    from dlo_lib.cli.jupyter import free_port, start_jupyterlab
    from dlo_lib.cli.workspace import update_workspace, work_dir

    free_port(port)  # before anything is copied
    for update in update_workspace():
        for name in update.kept:
            console.print(
                f"{update.folder.name}: the course has a newer {name}; yours is kept. Rename yours to get the new one.", soft_wrap=True
            )
    console.print(f"Your labs are in {work_dir()}. Stop the server with Ctrl-C.", soft_wrap=True)
    start_jupyterlab(work_dir(), port, browser=not no_browser)


@app.command()
def labs(as_json: AsJson = False) -> None:
    """List the labs: number, title, core or elective, minutes, points, and how far you are."""
    from dlo_lib.grading.progress import standings

    rows = standings()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("lab", "title", "path", "minutes", "points", "earned", "state", title="The labs")
    for row in rows:
        table.add_row(
            row.directory, row.title, "core" if row.core else "elective", str(row.minutes), f"{row.points:g}", f"{row.earned:g}", row.state
        )
    console.print(table)


@app.command()
def check(lab: LabName, notebook: Annotated[Path | None, typer.Option(help="another copy than your own")] = None) -> None:
    """Run the visible checks on your own copy of a lab and show what passes. Exit status 1 when something does not pass yet."""
    from dlo_lib.cli.reports import show_report
    from dlo_lib.cli.workspace import own_notebook
    from dlo_lib.grading.judge import visible_report

    path = notebook or own_notebook(lab)
    if not path.is_file():
        raise UserError(f"no notebook at {path}: give the path of an .ipynb file")
    with console.status(f"running the visible checks of {lab} on {path} ..."):
        report = visible_report(path)
    raise typer.Exit(0 if show_report(report, console) else 1)


app.command()(course.receipt)
app.add_typer(jobs.jobs, name="jobs")
for command in (make.course, course.release, course.kit, course.collect, grade, course.feedback, course.export, course.similar):
    app.command(rich_help_panel=INSTRUCTORS)(command)
app.add_typer(course.roster, name="roster", rich_help_panel=INSTRUCTORS)
app.command(rich_help_panel=AUTHORS)(make.build)
app.command(rich_help_panel=AUTHORS)(make.classroom)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what is not, with the cure for each thing missing. Exit status 2 when the labs cannot run."""
    from dlo_lib.cli.doctor import examine, verdict

    if as_json:
        findings = examine()
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        with console.status("looking at this machine ..."):
            findings = examine()
        table = Table("", "what", "found", "cure", title="dlo doctor")
        for finding in findings:
            mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.required else "[yellow]absent[/]"
            table.add_row(mark, finding.name, finding.found, finding.cure)
        console.print(table)
    verdict(findings)
