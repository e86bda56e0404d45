"""The commands of `dlo`. Each command is a few lines that call the packages below."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.base.errors import UserError
from dlo_lib.cli import course, jobs, make
from dlo_lib.cli.deadlines import deadlines
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.generate import generate
from dlo_lib.cli.grade import grade
from dlo_lib.cli.leaderboard import leaderboard
from dlo_lib.cli.parity import parity
from dlo_lib.cli.plan import plan
from dlo_lib.cli.roster import roster

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
    port: Annotated[
        int | None,
        typer.Option(help="port of the server; default: the first free port from 8888", min=1, max=65535),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="only print the URL")] = False,
    exchange: Annotated[
        Path | None,
        typer.Option(
            help="the folder of your class's exchange; default: that of your nbgrader configuration"
        ),
    ] = None,
) -> None:
    """Open JupyterLab on your copy of the labs.

    The first use creates the copy; your notebooks are never overwritten.
    """
    from dlo_lib.cli.jupyter import free_port, start_jupyterlab
    from dlo_lib.cli.workspace import update_workspace, work_dir
    from dlo_lib.grading.lab.exchange import find_exchange

    free_port(port)  # fails before the copy
    shared = find_exchange(exchange)
    for update in update_workspace():
        for name in update.kept:
            console.print(
                f"{update.folder.name}: the course has a newer {name}; your copy is kept. "
                f"dlo fresh {update.folder.name[:2]} brings the new one, and keeps yours beside it.",
                soft_wrap=True,
            )
    console.print(f"Your labs are in {work_dir()}. Stop the server with Ctrl-C.", soft_wrap=True)
    console.print(str(shared), soft_wrap=True)
    start_jupyterlab(work_dir(), port, not no_browser, shared)


@app.command()
def fresh(lab: LabName) -> None:
    """Begin a lab again with the notebook as it is released; yours is kept beside it under another name."""
    from dlo_lib.cli.workspace import fresh_copy

    notebook, kept = fresh_copy(lab)
    console.print(
        f"{notebook} is as released. Your earlier notebook is {kept.name}, in the same folder. If the "
        "notebook is open in JupyterLab, reload it (menu File, Reload Notebook from Disk) before you save.",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def labs(as_json: AsJson = False) -> None:
    """List the labs: number, title, core or elective, minutes, points, your progress, and what your class
    knows: released, due, submitted, graded.
    """
    from dlo_lib.cli.workspace import work_dir
    from dlo_lib.grading.lab.course import labs as every_lab
    from dlo_lib.grading.notebook.class_state import class_states
    from dlo_lib.grading.notebook.progress import standings

    rows, states = standings(), {}
    try:
        states = class_states(every_lab(), work_dir())
    except UserError as error:  # the labs are listed without the class too
        Console(stderr=True).print(str(error), soft_wrap=True, markup=False)
    in_class = {name: state.said() for name, state in states.items()}
    if as_json:
        print(json.dumps([{**asdict(row), "class": in_class.get(row.directory)} for row in rows], indent=1))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title="The labs")
    table.add_column("lab", no_wrap=True)
    table.add_column("title", min_width=15)  # gets the rest of 80 columns without breaking a word
    for name in ("path", "min", "points", "state"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("min", "points") else "left")
    if states:
        table.add_column("class", min_width=20)
    for row in rows:
        points = f"{row.earned:g}/{row.points:g}"
        cells = [row.directory, row.title, "core" if row.core else "elective", str(row.minutes), points]
        cells += [row.state, *([in_class.get(row.directory, "")] if states else [])]
        table.add_row(*cells)
    console.print(table)


@app.command()
def check(
    lab: LabName,
    notebook: Annotated[Path | None, typer.Option(help="the notebook to check; default: your copy")] = None,
    unsafe: Annotated[
        bool,
        typer.Option("--unsafe", help="run a notebook that is not in your folder of labs without a sandbox"),
    ] = False,
) -> None:
    """Run the visible checks on your copy of a lab and show the results.

    A notebook outside your folder of labs may be another person's, so it runs only in a sandbox. The exit
    status is 1 if a check fails.
    """
    from dlo_lib.cli.workspace import own_notebook, work_dir
    from dlo_lib.grading.sandbox.isolation import required_isolation

    path = notebook or own_notebook(lab)
    if not path.is_file():
        raise UserError(f"no notebook at {path}: give the path of an .ipynb file")
    if notebook and not unsafe and not path.resolve().is_relative_to(work_dir().resolve()):
        required_isolation()
    # Only now, because the judge imports torch and nbgrader.
    from dlo_lib.cli.reports import record_report, show_report
    from dlo_lib.grading.judge.judge import visible_report

    running = f"running the visible checks of {lab} on {path} (a minute or more if they start ranks) ..."
    if not console.is_terminal:  # where no status is shown
        console.print(running, soft_wrap=True, highlight=False)
    with console.status(running):
        report = visible_report(path)
    if notebook is None:
        record_report(report)
    raise typer.Exit(0 if show_report(report, console) else 1)


@app.command()
def submit(lab: LabName) -> None:
    """Submit your notebook of a lab to your class, through the exchange of nbgrader.

    You may submit again; the last submission counts, unless it is late and an earlier one was on time."""
    from dlo_lib.cli.submission import submit_lab, what_counts
    from dlo_lib.grading.classroom.collect.receipt import receipt_of

    with console.status(f"submitting {lab} ..."):
        notebook = submit_lab(lab)
    console.print(
        f"Submitted {notebook}. Its receipt (SHA-256) is {receipt_of(notebook)}.",
        soft_wrap=True,
        highlight=False,
    )
    for line in what_counts(lab, notebook):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


app.command()(course.receipt)
app.add_typer(jobs.jobs, name="jobs")
app.command()(plan)
app.command()(parity)
app.command()(generate)
for command in (
    make.course,
    course.release,
    course.kit,
    deadlines,
    course.collect,
    grade,
    course.feedback,
    course.export,
    course.similar,
    leaderboard,
    make.slides,
):
    app.command(rich_help_panel=INSTRUCTORS)(command)
app.add_typer(roster, name="roster", rich_help_panel=INSTRUCTORS)
app.command(rich_help_panel=AUTHORS)(make.new_lab)
app.command(rich_help_panel=AUTHORS)(make.build)
app.command(rich_help_panel=AUTHORS)(make.classroom)


@app.command()
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="with --hub, as administrator: the hub.toml", metavar="[HUB.TOML]", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    hub: Annotated[
        bool,
        typer.Option("--hub", help="try the rights of a class on a JupyterHub, as administrator or student"),
    ] = False,
) -> None:
    """Check the installation and show a cure for each missing part.

    The exit status is 2 if the labs cannot run, and 1 in the folder of a course that cannot be graded here.
    With --hub, it is 1 if a right is missing or too wide.
    """
    from dlo_lib.cli.doctor import can_grade, examine, verdict

    if file is not None and not hub:
        raise UserError(f"dlo doctor takes no file: dlo doctor --hub {file}")
    if hub:
        from dlo_lib.cli.doctor_hub import examine_hub

        findings = _shown("dlo doctor --hub", lambda: examine_hub(file), as_json)
        raise typer.Exit(1 if any(finding.required and not finding.ok for finding in findings) else 0)
    findings = _shown("dlo doctor", examine, as_json)
    verdict(findings)
    if not can_grade(findings):
        raise typer.Exit(1)


def _shown(title: str, look: Callable[[], list[Diagnosis]], as_json: bool) -> list[Diagnosis]:
    """Run the checks and print them as a table or as JSON."""
    if as_json:
        findings = look()
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return findings
    with console.status("checking ..."):
        findings = look()
    table = Table("", "what", "found", "cure", title=title)
    for finding in findings:
        mark = (
            "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.required else "[yellow]absent[/]"
        )
        table.add_row(mark, escape(finding.name), escape(finding.found), escape(finding.cure))
    console.print(table)
    return findings
