"""The instructor's commands around grading: release, kit, collect, feedback, export, similar, roster; and the student's receipt."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dlo_lib.files import write_text
from dlo_lib.text import tr

if TYPE_CHECKING:
    from dlo_lib.grading.inventory import Inventory

LabName = Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)]
Course = Annotated[Path, typer.Option(help="the course folder, with its nbgrader_config.py")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]

console = Console()
roster = typer.Typer(help="The students of the course.", no_args_is_help=True)


class Format(Enum):
    """What a table of grades is for."""

    MOODLE = "moodle"
    CSV = "csv"


def release(
    lab: LabName,
    course: Course = Path(),
    again: Annotated[bool, typer.Option("--again", help="replace a release that students can fetch already")] = False,
    prove_only: Annotated[bool, typer.Option("--prove-only", help="run the proofs and release nothing; needs no course")] = False,
) -> None:
    """Prove a lab and release it to the class.

    It is refused unless the solution scores full marks, the untouched notebook nothing, each mutant loses its points, labs/ is in step, and
    nothing students must not have is in it.
    """
    from dlo_lib.grading.course import find_lab, source_labs
    from dlo_lib.grading.judge import zygote_for
    from dlo_lib.grading.nbgrader_course import open_course
    from dlo_lib.grading.proof import number_of_proofs, prove, refuse
    from dlo_lib.grading.publish import check_exchange, check_unpublished, publish
    from dlo_lib.grading.source import read_lab, source_folder

    info = find_lab(lab, source_labs())
    opened = None if prove_only else open_course(course)
    if opened is not None:
        check_exchange(opened)  # before the minutes that the proofs take
        if not again:
            check_unpublished(opened, info)
    source = read_lab(source_folder(info))
    proofs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal  # in a file the bar would be an empty line
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress, zygote_for(source) as zygote:
        bar = progress.add_task(tr("proving {lab}", lab=info.directory), total=number_of_proofs(source))
        for proof in prove(source, zygote):
            proofs.append(proof)
            progress.advance(bar)
            for fault in proof.faults:
                progress.console.print(f"[red]✗[/] {escape(proof.name)}: {escape(fault)}", soft_wrap=True)
    refuse(source, proofs)
    console.print(tr("{lab}: {number} proofs hold", lab=info.directory, number=len(proofs)))
    if opened is not None:
        console.print(tr("released: students fetch it from {folder}", folder=publish(opened, info, again)), soft_wrap=True)


def kit(out: Annotated[Path, typer.Option(help="the archive to write")] = Path("dlo-kit.tar.gz")) -> None:
    """Make the students' archive: labs and library, no solutions, hidden checks or mutants. `make lab` works in it."""
    from dlo_lib.grading.kit import write_kit

    target = write_kit(out)
    console.print(tr("{file} ({size:.1f} MB)", file=target, size=target.stat().st_size / 1e6), soft_wrap=True)


def collect(
    lab: LabName,
    course: Course = Path(),
    source: Annotated[Path | None, typer.Option("--from", help="a folder or Moodle's zip; nbgrader's exchange without")] = None,
    as_json: AsJson = False,
) -> None:
    """Collect what was handed in: an inventory of everyone, and a receipt for each submission. Nothing is lost or replaced unsaid."""
    from dlo_lib.grading.collect import INVENTORY
    from dlo_lib.grading.collect import collect as take_in
    from dlo_lib.grading.course import find_lab, source_labs
    from dlo_lib.grading.export import grades_folder
    from dlo_lib.grading.feedback import release_receipts
    from dlo_lib.grading.nbgrader_course import open_course

    info, opened = find_lab(lab, source_labs()), open_course(course)
    inventory = take_in(opened, info, source)
    if as_json:
        print(inventory.json())
    else:
        _show(inventory)
        console.print(tr("inventory and receipts: {folder}", folder=grades_folder(opened, info) / INVENTORY), soft_wrap=True)
    if source is None:
        release_receipts(opened, inventory)  # last: what was collected is said also where the exchange fails


def _show(inventory: Inventory) -> None:
    from dlo_lib.grading.inventory import State

    table = Table("student", "state", "notebook", "late", "receipt", "notes", title=f"{inventory.lab.directory}: {inventory.lab.title}")
    colours = {State.MISSING: "yellow", State.REFUSED: "red", State.UNKNOWN: "red"}
    for item in inventory.items:
        state = f"[{colours.get(item.state, 'green')}]{item.state.value}[/]"
        name = f"{item.notebook} (renamed)" if item.renamed else item.notebook
        hours = f"{item.late / 3600:.1f} h" if item.late else ""
        table.add_row(escape(item.student), state, escape(name), hours, item.sha256[:12], escape("; ".join(item.notes)))
    console.print(table)
    received = inventory.of(State.NEW, State.REPLACED, State.UNCHANGED, State.KEPT)
    missing, refused, unknown = (len(inventory.of(state)) for state in (State.MISSING, State.REFUSED, State.UNKNOWN))
    renamed, late = sum(1 for item in inventory.items if item.renamed), sum(1 for item in inventory.items if item.late)
    console.print(
        tr(
            "{received} received, {missing} missing, {renamed} renamed, {late} late, {refused} refused, {unknown} not of the roster",
            received=len(received), missing=missing, renamed=renamed, late=late, refused=refused, unknown=unknown,
        )
    )  # fmt: skip
    if unread := [item.student for item in received if not item.sha256]:
        console.print(
            tr("received without a notebook that can be read: {students}", students=", ".join(unread)), soft_wrap=True, markup=False
        )


def feedback(
    lab: LabName,
    course: Course = Path(),
    release: Annotated[bool, typer.Option(help="put the pages where `nbgrader fetch_feedback` finds them")] = True,
) -> None:
    """Make a page for each student that says what passed, what failed and why; released to the exchange."""
    from dlo_lib.grading.course import find_lab, source_labs
    from dlo_lib.grading.feedback import make_feedback, release_feedback
    from dlo_lib.grading.nbgrader_course import open_course

    info, opened = find_lab(lab, source_labs()), open_course(course)
    with console.status(tr("writing the feedback of {lab} ...", lab=info.directory)):
        pages = make_feedback(opened, info)
        if release:
            release_feedback(opened, info)
    folder = Path(opened.coursedir.root) / opened.coursedir.feedback_directory
    console.print(tr("{number} pages in {folder}", number=len(pages), folder=folder), soft_wrap=True)


def export(
    lab: LabName,
    to: Annotated[Format, typer.Option(help="moodle: for its grade import; csv: every question")] = Format.CSV,
    out: Annotated[Path | None, typer.Option(help="the file to write; the terminal without")] = None,
    course: Course = Path(),
) -> None:
    """Write the grades of a lab as a table. The same grades give the same bytes."""
    from dlo_lib.grading.batch import released
    from dlo_lib.grading.course import find_lab, source_labs
    from dlo_lib.grading.export import read_grades
    from dlo_lib.grading.moodle import failed, moodle_csv
    from dlo_lib.grading.nbgrader_course import open_course
    from dlo_lib.grading.roster import read_roster

    info, opened = find_lab(lab, source_labs()), open_course(course)
    released(opened, info)
    table = read_grades(opened, info)
    text = table.csv() if to is Format.CSV else moodle_csv(table, {person.id: person for person in read_roster(opened)})
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
        console.print(tr("{number} students in {file}", number=len(table.rows), file=out), soft_wrap=True)
    if broken := [row.student for row in table.rows if failed(row)]:
        Console(stderr=True).print(
            tr("without points, because grading failed: {students}", students=", ".join(broken)), soft_wrap=True, markup=False
        )


def similar(lab: LabName, course: Course = Path(), as_json: AsJson = False) -> None:
    """List submissions that share much of their code, with each other or with the library, for you to look at. It is no judgement."""
    from dlo_lib.grading.course import find_lab, source_labs
    from dlo_lib.grading.export import grades_folder
    from dlo_lib.grading.nbgrader_course import open_course
    from dlo_lib.grading.similar import SIMILAR
    from dlo_lib.grading.similar import similar as find_similar

    info, opened = find_lab(lab, source_labs()), open_course(course)
    matches = find_similar(opened, info)
    if as_json:
        print(json.dumps([asdict(match) for match in matches], indent=1))
        return
    table = Table("one", "other", "shared", "of one", "of other", "cells", title=f"{info.directory}: {info.title}")
    for match in matches:
        cells = ", ".join(match.cells_of_one)
        table.add_row(
            escape(match.one),
            escape(match.other),
            str(match.shared),
            f"{match.share_of_one:.0%}",
            f"{match.share_of_other:.0%}",
            escape(cells),
        )
    console.print(table if matches else tr("no two submissions share more than the exercise explains"))
    console.print(tr("also in {file}", file=grades_folder(opened, info) / SIMILAR), soft_wrap=True)


def receipt(notebook: Annotated[Path, typer.Argument(help="a notebook, as it was handed in", show_default=False)]) -> None:
    """Print the SHA-256 of a notebook: the number on your receipt, when it is the file that was received."""
    from dlo_lib.grading.receipt import receipt_of

    print(f"{receipt_of(notebook)}  {notebook}")


@roster.command("import")
def import_(
    users: Annotated[Path, typer.Argument(help="a CSV with a header: id, first name, last name, email", show_default=False)],
    course: Course = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would change, and change nothing")] = False,
) -> None:
    """Bring the roster up to date from a table. What changes is listed; nobody is removed; a file with a mistake changes nothing."""
    from dlo_lib.grading.nbgrader_course import open_course
    from dlo_lib.grading.roster import Change, import_roster

    differences = import_roster(open_course(course), users, dry_run)
    table = Table("", "student", "name", "what changes", title=tr("roster"))
    for line in differences:
        if line.change is not Change.SAME:
            colour = {Change.NEW: "green", Change.CHANGED: "yellow"}.get(line.change, "dim")
            name = f"{line.person.first_name} {line.person.last_name}".strip()
            table.add_row(f"[{colour}]{line.change.value}[/]", escape(line.person.id), escape(name), escape(line.what))
    if table.row_count:
        console.print(table)
    counts = {change: sum(1 for line in differences if line.change is change) for change in Change}
    console.print(
        tr("{new} new, {changed} changed, {same} unchanged, {absent} in the course and not in the file",
           new=counts[Change.NEW], changed=counts[Change.CHANGED], same=counts[Change.SAME], absent=counts[Change.ABSENT])
    )  # fmt: skip
    if dry_run:
        console.print(tr("nothing was changed (--dry-run)"))
