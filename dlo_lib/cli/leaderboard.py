"""`dlo leaderboard`: what the judge measured of a class, with intervals, as a page and in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.base.text import tr
from dlo_lib.cli.course import Course
from dlo_lib.cli.out import require_writable, writing


def leaderboard(
    lab: Annotated[str, typer.Argument(help="a lab: 09_the_race, 09 or the_race", show_default=False)],
    course: Course = Path(),
    names: Annotated[bool, typer.Option("--names", help="show the ids of the students")] = False,
    out: Annotated[
        Path | None, typer.Option(help="the page to write; default: grades/<lab>/leaderboard.html")
    ] = None,
) -> None:
    """Write the leaderboard of a lab that measures, such as the race, from the graded submissions.

    Entries that these runs cannot distinguish are one group. A run without commit, seed, configuration and
    data hash has no place. The baseline and two references of the race, trained here with the same seeds, are
    rows without a place. Without --names, the feedback page of a student says which entry is the student's.
    """
    from dlo_lib.grading.classroom.feedback.leaderboard import read_leaderboard, write_leaderboard
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.lab.course import find_lab, source_labs
    from dlo_lib.labkit.race_board import reference_rows

    if out is not None:
        require_writable(out)
    info, opened = find_lab(lab, source_labs()), open_course(course)
    board = read_leaderboard(opened, info, names, reference_rows)
    console = Console()
    table = Table(
        tr("group"),
        tr("entry"),
        tr("mean score"),
        tr("95 % interval"),
        title=tr("leaderboard of {lab}", lab=info.directory),
    )
    numbered = [(str(number), entry) for number, group in enumerate(board.groups, 1) for entry in group]
    for place, entry in [*numbered, *((tr("reference"), row) for row in board.references)]:
        found = entry.interval
        bounds = f"{found.low:.4f} – {found.high:.4f}"
        table.add_row(place, escape(entry.name), f"{found.mean:.4f}", bounds)
    console.print(table if board.groups else tr("no entry has a place yet"))
    for name, reason in board.outside:
        console.print(
            tr("no place, {name}: {reason}", name=name, reason=reason), soft_wrap=True, markup=False
        )
    with writing(out or Path()):
        file = write_leaderboard(opened, info, board, out)
    console.print(tr("the page is {file}", file=file), soft_wrap=True, highlight=False)
