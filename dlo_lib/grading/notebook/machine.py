"""What this machine has for the labs, shown by a cell of lab 00: the lines of ``dlo doctor`` that concern
students.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlo_lib.grading.checks.verdict import Shown, show
from dlo_lib.grading.notebook.start_page import run_command
from dlo_lib.markup import render
from dlo_lib.text import columns, tr

GREEN, RED = "#1a7f37", "#c0143c"


def machine() -> None:
    """Show whether this machine can run the labs, with the cure for each missing part."""
    printed = run_command("doctor", "--json", folder=Path.cwd())
    try:
        findings, _ = json.JSONDecoder().raw_decode(printed)  # an error of `dlo doctor` follows the findings
    except ValueError:
        show(Shown(printed))
        return
    show(shown_findings(findings))


def shown_findings(findings: Sequence[Mapping[str, Any]]) -> Shown:
    """Return the required parts and the GPU as a table, with one sentence above it.

    Args:
        findings: what ``dlo doctor --json`` prints.
    """
    chosen = [finding for finding in findings if finding["required"] or finding["name"] == "gpu"]
    missing = [finding["name"] for finding in chosen if finding["required"] and not finding["ok"]]
    heading = (
        tr("The labs cannot run yet: see the cure for {names}.", names=", ".join(missing))
        if missing
        else tr("This machine can run the labs.")
    )
    rows = [
        {
            "mark": "✓" if finding["ok"] else "✗" if finding["required"] else "–",
            "colour": GREEN if finding["ok"] else RED if finding["required"] else "",
            "name": finding["name"],
            "found": finding["found"],
            "cure": "" if finding["ok"] else finding["cure"],
        }
        for finding in chosen
    ]
    text = columns([(row["mark"], row["name"], row["found"], row["cure"]) for row in rows])
    return Shown(f"{heading}\n{text}", render("machine", heading=heading, rows=rows))
