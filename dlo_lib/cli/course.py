"""The commands of instructors: release, kit, collect, feedback, export, similar; for students: receipt."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.cli.out import require_writable, writing
from dlo_lib.cli.reports import progress_bar

if TYPE_CHECKING:
    from dlo_lib.grading.classroom.gradebook.inventory import Inventory

LabName = Annotated[str, typer.Argument(help="a lab: 13_dp_limit, 13 or dp_limit", show_default=False)]


def _entered(folder: Path) -> Path:
    """Let the rest of the command, and what it starts, use the checkout of the course in ``folder``."""
    from dlo_lib.grading.lab.course import checkout_of

    if not os.environ.get("DLO_COURSE") and (checkout := checkout_of(folder)) is not None:
        os.environ["DLO_COURSE"] = str(checkout)
    return folder


Course = Annotated[
    Path, typer.Option(help="the course folder, with its nbgrader_config.py", callback=_entered)
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]

console = Console()


class Format(Enum):
    """The format of a table of grades."""

    MOODLE = "moodle"
    CSV = "csv"


def release(
    lab: LabName,
    course: Course = Path(),
    again: Annotated[
        bool, typer.Option("--again", help="replace a release that students can already fetch")
    ] = False,
    without_references: Annotated[
        bool,
        typer.Option(
            "--without-references", help="leave out the answers that lab.use_reference gives a stuck student"
        ),
    ] = False,
    prove_only: Annotated[
        bool, typer.Option("--prove-only", help="run the proofs without a release; needs no course")
    ] = False,
    secrets: Annotated[
        int, typer.Option(help="repeat the proofs with the inputs of this number of class secrets", min=1)
    ] = 1,
) -> None:
    """Prove a lab and release it to the class.

    The release requires that the solution gets full marks, the unchanged notebook gets no points, each mutant
    loses its points, the notebook in labs/ is built from its text, and the release contains no file that is
    not for students."""
    from dlo_lib.grading.classroom.gradebook.deadlines import publish_deadlines
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.classroom.publish.publication import (
        check_exchange,
        check_unpublished,
        check_writable,
        publish,
    )
    from dlo_lib.grading.judge.judge import zygote_for
    from dlo_lib.grading.judge.lab_proof import number_of_proofs, proof_secrets, prove, require_proofs
    from dlo_lib.grading.judge.undrawn_values import renewed_undrawn
    from dlo_lib.grading.lab.course import find_lab, source_labs
    from dlo_lib.grading.lab.source import read_lab, source_folder

    info = find_lab(lab, source_labs())
    opened = None if prove_only else open_course(course)
    if opened is not None:
        check_writable(opened)  # before the proofs, which take minutes
        check_exchange(opened)
        if not again:
            check_unpublished(opened, info)
    source = read_lab(source_folder(info))
    proofs = []
    with progress_bar(console) as progress, zygote_for(source) as zygote:
        total = number_of_proofs(source, secrets)
        bar = progress.add_task(tr("proving {lab}", lab=info.directory), total=total)
        for proof in prove(source, zygote, proof_secrets(secrets)):
            proofs.append(proof)
            progress.advance(bar)
            for fault in proof.faults:
                progress.console.print(f"[red]✗[/] {escape(proof.name)}: {escape(fault)}", soft_wrap=True)
        require_proofs(source, proofs)
        progress.update(bar, description=tr("what no draw of {lab} varies", lab=info.directory))
        for line in renewed_undrawn(source, zygote).without_reason():
            progress.console.print(
                f"[yellow]![/] {escape(line)}: {tr('draw it, or write the reason into undrawn.json')}",
                soft_wrap=True,
            )
    console.print(tr("{lab}: {number} proofs hold", lab=info.directory, number=len(proofs)))
    if opened is not None:
        console.print(
            tr(
                "released: students fetch it from {folder}",
                folder=publish(opened, info, again, not without_references),
            ),
            soft_wrap=True,
        )
        _show_notes(filter(None, [publish_deadlines(opened)]))


def kit(
    out: Annotated[Path, typer.Option(help="the archive to write")] = Path("dlo-kit.tar.gz"),
    without_answers: Annotated[
        bool,
        typer.Option(
            "--without-answers",
            help="leave out what lab.use_reference and lab.quiz.reveal() give a person without a class",
        ),
    ] = False,
) -> None:
    """Write the archive for students: labs and library, without solutions, hidden checks and mutants.

    `make lab` works in it.
    """
    from dlo_lib.grading.lab.kit import write_kit

    require_writable(out)
    with writing(out):
        target = write_kit(out, with_answers=not without_answers)
    console.print(tr("{file} ({size:.1f} MB)", file=target, size=target.stat().st_size / 1e6), soft_wrap=True)


def collect(
    lab: LabName,
    course: Course = Path(),
    source: Annotated[
        Path | None, typer.Option("--from", help="a folder or Moodle's zip; default: nbgrader's exchange")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Collect the submissions: write an inventory of all students and a receipt for each submission.

    Every lost or replaced submission is reported.
    """
    from dlo_lib.grading.classroom.collect.collection import collect as take_in
    from dlo_lib.grading.classroom.feedback.feedback import release_receipts
    from dlo_lib.grading.classroom.gradebook.deadlines import publish_deadlines
    from dlo_lib.grading.classroom.gradebook.export import grades_folder
    from dlo_lib.grading.classroom.gradebook.inventory import FILE
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.lab.course import find_lab, source_labs

    info, opened = find_lab(lab, source_labs()), open_course(course)
    inventory = take_in(opened, info, source, waiting=_wait_for_grader)
    if as_json:
        print(inventory.json())
    else:
        _show(inventory)
        console.print(
            tr("inventory and receipts: {folder}", folder=grades_folder(opened, info) / FILE),
            soft_wrap=True,
        )
    _show_notes(filter(None, [publish_deadlines(opened)]))
    if source is None:
        release_receipts(opened, inventory)  # last: the exchange may fail


def _wait_for_grader(process: str) -> None:
    text = "waiting until the grader (process {process}) is done with the lab"
    _show_notes([tr(text, process=process)])


def _show(inventory: Inventory) -> None:
    from dlo_lib.grading.classroom.gradebook.inventory import ItemState
    from dlo_lib.grading.lab.times import how_late

    table = Table(
        "student",
        "state",
        "notebook",
        "late",
        "receipt",
        "notes",
        title=f"{inventory.lab.directory}: {inventory.lab.title}",
    )
    colours = {ItemState.MISSING: "yellow", ItemState.REFUSED: "red", ItemState.UNKNOWN: "red"}
    for item in inventory.items:
        state = f"[{colours.get(item.state, 'green')}]{item.state.value}[/]"
        name = f"{item.notebook} (renamed)" if item.renamed else item.notebook
        after = how_late(item.late) if item.late else ""
        table.add_row(
            escape(item.student), state, escape(name), after, item.sha256[:12], escape("; ".join(item.notes))
        )
    console.print(table)
    received = inventory.of(ItemState.NEW, ItemState.REPLACED, ItemState.UNCHANGED, ItemState.KEPT)
    without_files = (ItemState.MISSING, ItemState.REFUSED, ItemState.UNKNOWN)
    missing, refused, unknown = (len(inventory.of(state)) for state in without_files)
    renamed, late = (
        sum(1 for item in inventory.items if item.renamed),
        sum(1 for item in inventory.items if item.late),
    )
    console.print(
        tr(
            "{received} received, {missing} missing, {renamed} renamed, {late} late, {refused} refused, "
            "{unknown} not in the roster",
            received=len(received), missing=missing, renamed=renamed, late=late, refused=refused,
            unknown=unknown,
        )
    )  # fmt: skip
    if unread := [item.student for item in received if not item.sha256]:
        console.print(
            tr("received without a notebook that can be read: {students}", students=", ".join(unread)),
            soft_wrap=True,
            markup=False,
        )


def feedback(
    lab: LabName,
    course: Course = Path(),
    release: Annotated[bool, typer.Option(help="release the pages for `nbgrader fetch_feedback`")] = True,
) -> None:
    """Write a page for each student with passed and failed checks and the reasons, and release it to the
    exchange.
    """
    from dlo_lib.grading.classroom.feedback.feedback import (
        make_feedback,
        note_on_inputs,
        release_feedback,
        students_without_page,
    )
    from dlo_lib.grading.classroom.gradebook.deadlines import publish_deadlines
    from dlo_lib.grading.classroom.gradebook.export import read_grades
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.lab.course import find_lab, source_labs

    info, opened = find_lab(lab, source_labs()), open_course(course)
    with console.status(tr("writing the feedback of {lab} ...", lab=info.directory)):
        pages = make_feedback(opened, info)
        if release:
            release_feedback(opened, info)
    folder = Path(opened.coursedir.root) / opened.coursedir.feedback_directory
    console.print(tr("{number} pages in {folder}", number=len(pages), folder=folder), soft_wrap=True)
    _show_notes([*read_grades(opened, info).notes, *filter(None, [publish_deadlines(opened)])])
    if note := note_on_inputs(opened, info):
        console.print(note, soft_wrap=True)
    for reason, students in students_without_page(opened, info, pages).items():
        console.print(
            tr("no page, {reason}: {students}", reason=reason, students=escape(", ".join(students))),
            soft_wrap=True,
        )


def export(
    lab: LabName,
    to: Annotated[
        Format, typer.Option(help="moodle: for its grade import; csv: every question")
    ] = Format.CSV,
    out: Annotated[Path | None, typer.Option(help="the file to write; default: the terminal")] = None,
    course: Course = Path(),
) -> None:
    """Write the grades of a lab as a table. The same grades give the same bytes."""
    from dlo_lib.grading.classroom.gradebook.export import settled_grades
    from dlo_lib.grading.classroom.gradebook.moodle import has_no_points, moodle_csv
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.classroom.gradebook.nbgrader_steps import require_release
    from dlo_lib.grading.classroom.roster.roster import read_roster
    from dlo_lib.grading.lab.course import find_lab, source_labs

    if out is not None:
        require_writable(out)
    info, opened = find_lab(lab, source_labs()), open_course(course)
    require_release(opened, info)
    table = settled_grades(opened, info)
    text = (
        table.csv()
        if to is Format.CSV
        else moodle_csv(table, {person.id: person for person in read_roster(opened)})
    )
    if out is None:
        print(text, end="")
    else:
        with writing(out):
            write_text(out, text)
        console.print(tr("{number} students in {file}", number=len(table.rows), file=out), soft_wrap=True)
    _show_notes(table.notes)
    if broken := [row.student for row in table.rows if has_no_points(row)]:
        text = "no points, because grading failed or was not run: {students}"
        _show_notes([tr(text, students=", ".join(broken))])


def _show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        Console(stderr=True).print(note, soft_wrap=True, markup=False)


def similar(lab: LabName, course: Course = Path(), as_json: AsJson = False) -> None:
    """List pairs of submissions that share much of their code, with each other or with the library, for a
    manual review: 1.00 is the score of two equal answers.
    """
    from dlo_lib.grading.classroom.gradebook.export import grades_folder
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.classroom.similar.similarity import FRAGMENTS, SIMILAR, find_similar
    from dlo_lib.grading.lab.course import find_lab, source_labs

    info, opened = find_lab(lab, source_labs()), open_course(course)
    matches = find_similar(opened, info)
    if as_json:
        print(json.dumps([asdict(match) for match in matches], indent=1))
        return
    table = Table("one", "other", "evidence", "cells: score", title=f"{info.directory}: {info.title}")
    unread = [match for match in matches if match.reason]
    pairs = [match for match in matches if not match.reason]
    for match in pairs:
        cells = []
        for cell in match.cells:
            elsewhere = "" if cell.of_other in (cell.of_one, match.other) else f", {cell.of_other}"
            cells.append(f"{cell.of_one}{elsewhere}: {cell.score:.2f}")
        table.add_row(
            escape(match.one), escape(match.other), f"{match.evidence:.1f}", escape("\n".join(cells))
        )
    console.print(table if pairs else tr("no two submissions share more than the exercise explains"))
    if unread:
        closed = Table("student", "cell or file", "why", title=tr("not compared as a whole: read these"))
        for match in unread:
            closed.add_row(escape(match.one), escape(match.other), escape(match.reason))
        console.print(closed)
    folder = grades_folder(opened, info)
    console.print(
        tr("also in {file}; the code is in {code}", file=folder / SIMILAR, code=folder / FRAGMENTS),
        soft_wrap=True,
    )


def receipt(
    notebook: Annotated[Path, typer.Argument(help="a notebook, as submitted", show_default=False)],
) -> None:
    """Print the SHA-256 of a notebook. It equals the number on your receipt if this file was received."""
    from dlo_lib.grading.classroom.collect.receipt import receipt_of

    print(f"{receipt_of(notebook)}  {notebook}")
