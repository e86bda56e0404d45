"""`dlo grade`: grade a class, print each row when it is ready, then print the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from dlo_lib.base.cores import usable_cores
from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cli.course import Course
from dlo_lib.cli.reports import progress_bar

FIRST_LINE = 60.0  # seconds
INTERRUPTED = 130  # exit status of a program that Ctrl-C ends

if TYPE_CHECKING:
    from dlo_lib.grading.judge.client import Judges


def grade(
    lab: Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)],
    course: Course = Path(),
    jobs: Annotated[
        int | None, typer.Option(help="submissions judged in parallel; default: the number of cores", min=1)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="keep the rows whose submission and lab are unchanged")
    ] = False,
    only: Annotated[str | None, typer.Option(help="grade one student again and keep the other rows")] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="grade without a sandbox; every row is marked UNSANDBOXED")
    ] = False,
    on_slurm: Annotated[
        bool, typer.Option("--slurm", help="judge on the nodes of a cluster, as an array of jobs")
    ] = False,
    keep_manual: Annotated[
        bool,
        typer.Option(
            "--keep-manual", help="points given by hand for an earlier submission also count for a new one"
        ),
    ] = False,
    array: Annotated[int, typer.Option(help="with --slurm: elements of the array", min=1)] = 20,
    cores: Annotated[int, typer.Option(help="with --slurm: cores of an element", min=1)] = 2,
    limit: Annotated[
        str | None,
        typer.Option(
            "--time",
            help="with --slurm: time limit of an element; default: two hours, or the longest of the site",
        ),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="with --slurm: the name or file of a site; default: $DLO_SITE")
    ] = None,
    account: Annotated[
        str, typer.Option(help="with --slurm: the account to charge; default: $DLO_ACCOUNT")
    ] = "",
) -> None:
    """Grade the collected submissions of a lab (instructors).

    Each student gets one row, whatever the submission is.

    The scores go to the nbgrader gradebook of the course; results.csv, results.json and timings.csv go to
    grades/<lab>/."""
    from dlo_lib.grading.classroom.roster.course_access import enter_course
    from dlo_lib.grading.judge.client import SECRET_FILE, no_course, start_client
    from dlo_lib.grading.lab.course import find_lab, source_labs

    began = time.monotonic()
    info = find_lab(lab, source_labs())
    if not (course / SECRET_FILE).is_file():
        raise no_course(course.resolve())  # before nbgrader is imported
    enter_course(course.resolve())
    console, stored = Console(), 0
    with _continued(lambda: stored, info.directory, course):
        # imports torch while this process imports nbgrader
        service = None if resume or on_slurm else start_client(info, course, unsafe)
        with service or nullcontext():
            from dlo_lib.grading.classroom.gradebook.batch import Done, Options, grade_lab
            from dlo_lib.grading.classroom.gradebook.timings import write_timings

            judges: Judges | None = service
            if on_slurm:
                from dlo_lib.cli.grade_slurm import Wanted, array_of_judges

                wanted = Wanted(array, cores, limit, site, account)
                judges = array_of_judges(info, course, wanted, unsafe)
            with progress_bar(console) as progress:
                title = tr("grading {lab}", lab=info.directory)
                bar = progress.add_task(f"{title}: {tr('the judge starts')}", total=None)

                def show(row: Done) -> None:
                    nonlocal stored
                    stored = row.number
                    progress.update(bar, total=row.of, completed=row.number)
                    took, points = time.monotonic() - began, f"{row.points:g}/{row.maximum:g}"
                    line = f"{took:6.1f} s  {escape(row.student)}  {points}  {escape(row.status)}"
                    progress.console.print(line)

                shown = _Running(progress, bar, title)
                options = Options(jobs or usable_cores(), resume, only, unsafe, keep_manual)
                table = grade_lab(info, course, show, options, judges, shown)
    results = course / "grades" / info.directory
    console.print(table.shown())
    for note in table.notes:
        console.print(note, soft_wrap=True, markup=False)
    console.print(tr("results: {folder}", folder=results), soft_wrap=True)
    write_timings(results, table)  # again, with what the end of the judging service has cost
    if table.stopped:
        raise UserError(table.stopped)


@contextmanager
def _continued(stored: Callable[[], int], lab: str, course: Path) -> Iterator[None]:
    """At Ctrl-C in the block, print how the grading continues, and exit with the status of an interrupt.

    Args:
        stored: returns the number of rows that are written.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = f"dlo grade {lab} --resume" + ("" if course == Path() else f" --course {course}")
        text = "interrupted; {number} rows of this run are stored: `{again}` continues with the others"
        Console(stderr=True).print(tr(text, number=stored(), again=again), soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED) from None


class _Running:
    """Shows the submissions that are being judged: beside the bar, or in a log as a line after 60 s, 120 s,
    240 s.
    """

    def __init__(self, progress: Progress, bar: TaskID, title: str) -> None:
        self._progress, self._bar, self._title = progress, bar, title
        self._next: dict[str, float] = {}

    def __call__(self, running: Mapping[str, float]) -> None:
        students = sorted(running, key=lambda student: -running[student])
        names = ", ".join(f"{escape(student)} {running[student]:.0f} s" for student in students[:4])
        if len(students) > 4:
            names += f", … ({len(students)})"
        what = names or tr("proving: the reference solution is judged first")
        self._progress.update(self._bar, description=f"{self._title}: {what}")
        for student in students if not self._progress.console.is_terminal else ():
            if running[student] >= self._next.get(student, FIRST_LINE):
                self._next[student] = 2 * self._next.get(student, FIRST_LINE)
                text = tr(
                    "{student} is still being judged, after {seconds:.0f} s",
                    student=student,
                    seconds=running[student],
                )
                self._progress.console.print(escape(text))
