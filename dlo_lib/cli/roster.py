"""``dlo roster``: the students of a course, and their accounts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.base.text import tr
from dlo_lib.cli.course import Course

console = Console()
roster = typer.Typer(help="The students of the course.", no_args_is_help=True)


@roster.command("import")
def import_(
    users: Annotated[
        Path, typer.Argument(help="a CSV with a header: id, first name, last name, email", show_default=False)
    ],
    course: Course = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the changes without making them")] = False,
) -> None:
    """Update the roster from a table and list the changes.

    No student is removed; a file with an error changes nothing.
    """
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.classroom.roster.roster import Change, import_roster
    from dlo_lib.grading.classroom.roster.roster_table import unread_columns

    differences = import_roster(open_course(course), users, dry_run)
    if unread := unread_columns(users):
        console.print(tr("columns that were not read: {names}", names=escape(", ".join(unread))))
    table = Table("", "student", "name", "what changes", title=tr("roster"))
    for line in differences:
        if line.change is not Change.SAME:
            colour = {Change.NEW: "green", Change.CHANGED: "yellow"}.get(line.change, "dim")
            name = f"{line.person.first_name} {line.person.last_name}".strip()
            table.add_row(
                f"[{colour}]{line.change.value}[/]", escape(line.person.id), escape(name), escape(line.what)
            )
    if table.row_count:
        console.print(table)
    counts = {change: sum(1 for line in differences if line.change is change) for change in Change}
    console.print(
        tr("{new} new, {changed} changed, {same} unchanged, {absent} in the course and not in the file",
           new=counts[Change.NEW], changed=counts[Change.CHANGED], same=counts[Change.SAME],
           absent=counts[Change.ABSENT])
    )  # fmt: skip
    if dry_run:
        console.print(tr("nothing was changed (--dry-run)"))


@roster.command()
def accounts(
    users: Annotated[
        Path, typer.Argument(help="the table of `dlo roster import`, with a column id", show_default=False)
    ],
    passwords: Annotated[
        Path, typer.Option(help="the file to write for the new accounts; only root can read it")
    ] = Path("passwords.csv"),
) -> None:
    """Create a Unix account on this machine for each student of a table, as root.

    Existing accounts stay as they are. On a JupyterHub, students log in with these names and passwords.
    """
    from dlo_lib.grading.classroom.roster.roster_table import parse_roster
    from dlo_lib.hub.accounts import create_accounts

    made = create_accounts([person.id for person in parse_roster(users)], passwords)
    console.print(tr("{new} created, {known} existed", new=len(made.created), known=len(made.known)))
    if made.created:
        console.print(tr("passwords: {file}", file=passwords), soft_wrap=True, highlight=False)
