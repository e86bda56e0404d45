"""What instructors make: a course of their own, a classroom to try one in, and ``labs/`` from ``solutions/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dlo_lib.errors import UserError
from dlo_lib.text import tr

console = Console()


def course(
    folder: Annotated[Path, typer.Argument(help="where it is to be; an existing one is brought up to date", show_default=False)],
    exchange: Annotated[Path | None, typer.Option(help="the folder that students fetch from and submit to; nbgrader's without")] = None,
) -> None:
    """Make a course: a folder with a gradebook of its own, in which nbgrader's commands and formgrader call the judge."""
    from dlo_lib.grading.nbgrader_course import create_course

    if exchange is not None:
        try:
            exchange.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(tr("no exchange in {folder}: {reason}", folder=exchange, reason=error.strerror)) from error
    made = create_course(folder, None if exchange is None else exchange.resolve())
    console.print(tr("the course is in {folder}; next, there: dlo roster import, dlo release", folder=made), soft_wrap=True)


def classroom(
    lab: Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)],
    folder: Annotated[Path | None, typer.Option(help="where to leave everything; below the state folder without")] = None,
) -> None:
    """Try the whole cycle of a lab on three made-up students, from its release to their feedback."""
    from dlo_lib.grading.classroom import classroom as run
    from dlo_lib.grading.classroom import number_of_steps
    from dlo_lib.grading.course import find_lab, source_labs

    info = find_lab(lab, source_labs())
    with Progress(TextColumn("{task.description:<16}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(tr("start"), total=number_of_steps())
        result = run(info, folder, lambda step: progress.update(task, advance=1, description=step))
    console.print(result.grades.shown())
    for student, page in result.feedback.items():
        console.print(tr("feedback of {student}: {page}", student=student, page=page), soft_wrap=True)
    console.print(tr("table: {file}", file=result.csv), soft_wrap=True)


def build(
    labs: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", help="13_dp_limit, 13 or dp_limit; all without")] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing, say what differs")] = False,
) -> None:
    """Write labs/ from solutions/, which are edited as text. With --check exit status 1 when they differ."""
    from dlo_lib.grading.course import find_lab, source_labs
    from dlo_lib.grading.release import check_course_in_step, check_in_step, release_lab

    known = source_labs()
    chosen = [find_lab(name, known) for name in labs or ()]
    if not check:
        unfinished: list[UserError] = []
        for lab in chosen or known:
            try:
                console.print(tr("written: {folder}", folder=release_lab(lab)), soft_wrap=True)
            except UserError as error:  # the other labs are written all the same
                unfinished.append(error)
        if unfinished:
            raise UserError("; ".join(map(str, unfinished)))
        return
    lines = [line for lab in chosen for line in check_in_step(lab)] if chosen else check_course_in_step()
    print("\n".join(lines) or tr("labs/ is in step with solutions/"))
    raise typer.Exit(1 if lines else 0)
