"""Print the progress and the reports of the judge in a terminal, and store their points."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dlo_lib.base.text import tr
from dlo_lib.cli.workspace import work_dir
from dlo_lib.grading.judge.report import GRADED, NO_ATTEMPT, Report
from dlo_lib.grading.lab.course import course_root, find_lab
from dlo_lib.grading.notebook.progress import read_progress


def show_report(report: Report, console: Console) -> bool:
    """Print one row per check, with its message if it fails; return whether all checks pass.

    Below the report of a notebook without an attempt is the file with which it was compared.
    """
    # "GRADED" is a word of the judge about a class; here nothing was graded.
    judged = report.status.startswith(GRADED)
    title = tr("visible checks") if judged else report.status
    table = Table(
        "", tr("question"), tr("check"), tr("points"), tr("message"), title=f"{report.lab}: {title}"
    )
    for question in report.questions.values():
        for check in question.checks:
            passed = check.points >= check.maximum
            mark = "[green]✓[/]" if passed else "[red]✗[/]"
            table.add_row(
                mark,
                question.question,
                check.title,
                f"{check.points:g}/{check.maximum:g}",
                escape(check.published),
            )
        if question.note:
            table.add_row("", question.question, "", "", escape(question.note))
    console.print(table)
    for warning in report.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)
    console.print(
        tr(
            "{points:g} of {maximum:g} points of the visible checks",
            points=report.points,
            maximum=report.maximum,
        )
    )
    if report.status == NO_ATTEMPT:
        console.print(_compared_with(report), soft_wrap=True, highlight=False, markup=False)
    return bool(report.questions) and report.points >= report.maximum


def _compared_with(report: Report) -> str:
    """A notebook without an attempt equals the released one: a student may have worked in that by mistake."""
    lab = find_lab(report.lab)
    released, own = course_root() / "labs" / lab.directory, work_dir() / lab.directory
    return tr(
        "No answer differs from those of the released notebook in {released}. If you wrote your answers "
        "there, move the notebook to {own}, and restore the released one.",
        released=released, own=own,
    )  # fmt: skip


def record_report(report: Report) -> None:
    """Store the points of a report of the visible checks as the student's progress.

    A notebook without an attempt changes nothing."""
    if report.status == NO_ATTEMPT:
        return
    progress = read_progress(report.lab)
    for name, question in report.questions.items():
        progress.earned[name], progress.possible[name] = question.points, question.maximum
    progress.save()


class _Count(MofNCompleteColumn):
    """``3/20``; nothing while the number of steps is not known."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        return Text("") if task.total is None else super().render(task)


def progress_bar(console: Console) -> Progress:
    """Create a progress bar that disappears at the end. It is disabled if the output is a file."""
    columns = (TextColumn("{task.description}"), BarColumn(), _Count(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
