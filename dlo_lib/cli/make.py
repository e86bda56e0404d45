"""Commands that create a course, a classroom for a trial run, and ``labs/`` from ``solutions/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir
from dlo_lib.base.text import tr
from dlo_lib.cli.out import require_writable, writing

console = Console()


def course(
    folder: Annotated[
        Path | None,
        typer.Argument(help="the folder of the course; an existing course is updated", show_default=False),
    ] = None,
    exchange: Annotated[
        Path | None,
        typer.Option(help="the folder that students fetch from and submit to; default: nbgrader's"),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="the Unix group whose members grade together; default: only you")
    ] = None,
    name: Annotated[str, typer.Option(help="the name of the course in the exchange")] = "dlo",
    hub: Annotated[
        Path | None,
        typer.Option(help="prepare all courses of a JupyterHub from its hub.toml; as root, without FOLDER"),
    ] = None,
) -> None:
    """Create a course: a folder with a gradebook, in which the commands of nbgrader and formgrader call the
    judge.

    Other users of the machine cannot read it. With --hub, the courses, the exchange and the settings of
    Jupyter of a JupyterHub are created or updated (deploy/hub/README.md).
    """
    if hub is not None:
        _prepare_hub(hub, folder)
        return
    if folder is None:
        raise UserError(tr("name the folder of the course, or give --hub hub.toml"))
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course

    if exchange is not None:
        try:
            exchange.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                tr(
                    "cannot create the exchange {folder} ({reason}): choose another folder",
                    folder=exchange,
                    reason=error.strerror,
                )
            ) from error
    made = create_course(folder, None if exchange is None else exchange.resolve(), group=group, course=name)
    console.print(
        tr("the course is in {folder}; next, run there: dlo roster import, dlo release", folder=made),
        soft_wrap=True,
    )


def _prepare_hub(file: Path, folder: Path | None) -> None:
    from dlo_lib.hub.folders import prepare
    from dlo_lib.hub.read_settings import read_settings

    if folder is not None:
        raise UserError(
            tr("--hub takes the folders of the courses from {file}: omit {folder}", file=file, folder=folder)
        )
    for line in prepare(read_settings(file)):
        console.print(line, soft_wrap=True, highlight=False)


def classroom(
    lab: Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)],
    folder: Annotated[
        Path | None, typer.Option(help="the folder for all files; default: below the state folder")
    ] = None,
) -> None:
    """Run the whole cycle of a lab with three fictitious students, from the release to the feedback."""
    if folder is None:
        state_dir()  # refused before the slow imports
    from dlo_lib.grading.classroom.publish.demo_class import classroom as run
    from dlo_lib.grading.classroom.publish.demo_class import number_of_steps
    from dlo_lib.grading.lab.course import find_lab, source_labs
    from dlo_lib.grading.sandbox.isolation import SANDBOX_CURE, find_isolation

    info = find_lab(lab, source_labs())
    if find_isolation().isolation is None:
        said = tr(
            "NO SANDBOX here: the three fictitious students are graded without one; "
            "`dlo grade` refuses a real class. Cure: {cure}",
            cure=SANDBOX_CURE,
        )
        console.print(f"[bold red]{escape(said)}[/]", soft_wrap=True)
    with Progress(
        TextColumn("{task.description:<16}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task(tr("start"), total=number_of_steps())
        result = run(info, folder, lambda step: progress.update(task, advance=1, description=step))
    console.print(result.grades.shown())
    for student, page in result.feedback.items():
        console.print(tr("feedback of {student}: {page}", student=student, page=page), soft_wrap=True)
    console.print(tr("table: {file}", file=result.csv), soft_wrap=True)


def build(
    labs: Annotated[
        list[str] | None, typer.Argument(metavar="[LAB]...", help="13_dp_limit, 13 or dp_limit; default: all")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing and show the differences")] = False,
) -> None:
    """Write the notebooks in labs/ from the texts in solutions/.

    With --check, the exit status is 1 if they differ.
    """
    from dlo_lib.grading.lab.course import find_lab, source_labs
    from dlo_lib.grading.lab.release import check_course_in_step, check_in_step, release_lab

    known = source_labs()
    chosen = [find_lab(name, known) for name in labs or ()]
    if not check:
        unfinished: list[UserError] = []
        for lab in chosen or known:
            try:
                console.print(tr("written: {folder}", folder=release_lab(lab)), soft_wrap=True)
            except UserError as error:  # the other labs are still written
                unfinished.append(error)
        if unfinished:
            raise UserError("; ".join(map(str, unfinished)))
        return
    lines = [line for lab in chosen for line in check_in_step(lab)] if chosen else check_course_in_step()
    print("\n".join(lines) or tr("labs/ is in step with solutions/"))
    raise typer.Exit(1 if lines else 0)


def new_lab(
    lab: Annotated[
        str,
        typer.Argument(metavar="NN_NAME", help="its number and name, such as 30_my_lab", show_default=False),
    ],
    title: Annotated[str, typer.Option(help="the title shown to people; default: the name")] = "",
) -> None:
    """Write a new lab that proves itself green: one example question with its text,
    checks, hints and mutants."""
    from dlo_lib.grading.lab.course import find_lab, source_labs
    from dlo_lib.grading.lab.new_lab import new_lab as write
    from dlo_lib.grading.lab.release import release_lab

    folder = write(lab, title)
    info = find_lab(lab, source_labs())
    console.print(tr("written: {folder} and {labs}", folder=folder, labs=release_lab(info)), soft_wrap=True)
    console.print(
        tr(
            "next: edit {text}, run `dlo build {number}`, prove it with `dlo release {number} --prove-only`",
            text=folder / f"{lab}.py",
            number=info.number,
        ),
        soft_wrap=True,
    )


def slides(
    lab: Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="the HTML file to write; default: NN_name.html here", show_default=False),
    ] = None,
    reduced: Annotated[
        bool, typer.Option("--reduced", help="run the notebook at the small sizes of the tests")
    ] = False,
) -> None:
    """Write slides from the headings and the figures of a lab: one HTML file that works offline.

    The reference notebook runs once, which takes about a minute. The slides show no code."""
    from dlo_lib.grading.lab.course import find_lab, source_folder, source_labs

    info = find_lab(lab, source_labs())
    source_folder(info)  # a student's installation has none: refused before the slow imports
    from dlo_lib.grading.classroom.publish.slides import write_slides

    target = out or Path(f"{info.directory}.html")
    require_writable(target)
    with (
        console.status(tr("running the reference notebook of {lab} ...", lab=info.directory)),
        writing(target),
    ):
        file = write_slides(info, target, reduced=reduced)
    console.print(tr("written: {file}", file=file), soft_wrap=True)
