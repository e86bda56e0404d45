"""What this machine has for the labs, shown by a cell of lab 00: the lines of ``dlo doctor`` that concern
students.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlo_lib.base.markup import render
from dlo_lib.base.text import columns, tr
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.doctor import examine_for_labs
from dlo_lib.grading.checks.verdict import Shown, show

GREEN, RED = "#1a7f37", "#c0143c"


def machine() -> None:
    """Show whether this machine can run the labs, with the cure for each missing part."""
    show(shown_findings(examine_for_labs()))


def shown_findings(findings: Sequence[Diagnosis]) -> Shown:
    """Return the findings as a table, with one sentence above it."""
    missing = [finding.name for finding in findings if finding.required and not finding.ok]
    heading = (
        tr("The labs cannot run yet: see the cure for {names}.", names=", ".join(missing))
        if missing
        else tr("This machine can run the labs.")
    )
    rows = [
        {
            "mark": "✓" if finding.ok else "✗" if finding.required else "–",
            "colour": GREEN if finding.ok else RED if finding.required else "",
            "name": finding.name,
            "found": finding.found,
            "cure": "" if finding.ok else finding.cure,
        }
        for finding in findings
    ]
    text = columns([(row["mark"], row["name"], row["found"], row["cure"]) for row in rows])
    return Shown(f"{heading}\n{text}", render("machine", heading=heading, rows=rows))
