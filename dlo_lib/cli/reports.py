"""The judge's report in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlo_lib.grading.report import Report
from dlo_lib.text import tr


def show_report(report: Report, console: Console) -> bool:
    """Print one row per check, with its message where it does not pass; whether everything passed."""
    table = Table("", tr("question"), tr("check"), tr("points"), tr("what it says"), title=f"{report.lab}: {report.status}")
    for question in report.questions.values():
        for check in question.checks:
            passed = check.points >= check.maximum
            mark = "[green]✓[/]" if passed else "[red]✗[/]"
            table.add_row(mark, question.question, check.title, f"{check.points:g}/{check.maximum:g}", escape(check.published))
        if question.note:
            table.add_row("", question.question, "", "", escape(question.note))
    console.print(table)
    for warning in report.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)
    console.print(tr("{points:g} of {maximum:g} points of the visible checks", points=report.points, maximum=report.maximum))
    return bool(report.questions) and report.points >= report.maximum
