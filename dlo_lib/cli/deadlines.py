"""`dlo deadlines`: read the course file, apply it to the gradebook, and show students the due dates."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.base.text import tr
from dlo_lib.cli.course import Course

console = Console()


def deadlines(course: Course = Path()) -> None:
    """Apply the due dates, extensions and penalties of course.toml, show them, and publish the due dates.

    Nothing is judged. Students see the due dates on the map of lab 00, in `dlo labs` and in `dlo submit`;
    they do not see extensions.
    """
    from dlo_lib.grading.classroom.gradebook.deadlines import publish_deadlines, rule_text, settle
    from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
    from dlo_lib.grading.lab.course import source_labs

    opened = open_course(course)
    with opened.gradebook as gradebook:
        released = {assignment.name for assignment in gradebook.assignments}
    labs = [lab for lab in source_labs() if lab.directory in released]
    table = Table(tr("lab"), tr("due"), tr("late work"), tr("extensions"), title=tr("deadlines"))
    file = None
    for lab in labs:
        found = settle(opened, lab)
        file, zone = found.file, found.file.zone

        def shown(moment: datetime | None, zone: object = zone) -> str:
            return "-" if moment is None else f"{moment.astimezone(zone):%a %d %b %Y %H:%M %Z}"  # type: ignore[arg-type]

        rule = rule_text(found.rule) or tr("loses no points")
        rule += tr("; replaces work that was on time") if found.rule.replaces else ""
        own = [
            f"{escape(student)}: {shown(found.of(student))}"
            for student in found.file.of(lab.directory).extensions
        ]
        table.add_row(lab.directory, shown(found.due), rule if found.due else "-", "\n".join(own))
    if labs:
        console.print(table)
    else:
        console.print(tr("no lab is released in this course: `dlo release` comes first"))
    if file is not None and not file.exists:
        text = "there is no {file}: the due dates are those of formgrader, in UTC"
        console.print(tr(text, file=file.path), soft_wrap=True)
    if note := publish_deadlines(opened):
        console.print(note, soft_wrap=True, markup=False)
