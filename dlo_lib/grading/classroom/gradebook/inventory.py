"""The inventory of a collected lab: the state and the receipt of each student's submission, as CSV
and JSON.
"""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from dlo_lib.grading.classroom.roster.tables import csv_text
from dlo_lib.grading.lab.course import LabInfo

FILE = "inventory.csv"


class ItemState(Enum):
    """The state of a student's submission."""

    NEW = "received"
    REPLACED = "received, replaces an earlier one"
    UNCHANGED = "received, unchanged"
    KEPT = "received before, now nothing newer"
    REFUSED = "refused"
    MISSING = "missing"
    UNKNOWN = "not in the roster"


@dataclass(frozen=True)
class Item:
    """A line of the inventory.

    Args:
        student: the id, or the name in the source if it matches no student.
        state: the state of the submission.
        notebook: the file name that the student gave the notebook.
        renamed: that name is not the lab's.
        sha256: the receipt.
        size: bytes of the notebook.
        submitted: the time in UTC.
        late: seconds after the due date.
        notes: remarks.
    """

    student: str
    state: ItemState
    notebook: str = ""
    renamed: bool = False
    sha256: str = ""
    size: int = 0
    submitted: datetime | None = None
    late: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """One line for each student of the roster, sorted, then one for each submission that matches no
    student.
    """

    lab: LabInfo
    items: tuple[Item, ...]

    def of(self, *states: ItemState) -> list[Item]:
        """Return the lines with one of ``states``."""
        return [item for item in self.items if item.state in states]

    def csv(self) -> str:
        """Return the table as CSV."""
        header = [
            "student",
            "state",
            "notebook",
            "renamed",
            "submitted_utc",
            "seconds_late",
            "bytes",
            "sha256",
            "notes",
        ]
        rows = [
            [item.student, item.state.value, item.notebook, "yes" if item.renamed else "",
             shown_time(item.submitted), str(item.late or ""),
             str(item.size or ""), item.sha256, "; ".join(item.notes)]
            for item in self.items
        ]  # fmt: skip
        return csv_text(header, rows)

    def json(self) -> str:
        """Return the table as JSON."""
        items = [
            {**asdict(item), "state": item.state.name, "submitted": shown_time(item.submitted)}
            for item in self.items
        ]
        return json.dumps({"lab": self.lab.directory, "items": items}, indent=1)

    def receipts(self) -> str:
        """Return the receipts as CSV: notebook, size, time and SHA-256 of each submission."""
        received = [item for item in self.items if item.sha256]
        rows = [
            [item.student, item.notebook, str(item.size), shown_time(item.submitted), item.sha256]
            for item in received
        ]
        return csv_text(["student", "notebook", "bytes", "submitted_utc", "sha256"], rows)


def refused_students(grades: Path) -> set[str]:
    """Return the students whose submission the last collection refused; ``grades`` has the inventory."""
    try:
        with open(grades / FILE, encoding="utf-8", newline="") as file:
            return {row["student"] for row in csv.DictReader(file) if row["state"] == ItemState.REFUSED.value}
    except FileNotFoundError:
        return set()


def shown_time(time: datetime | None) -> str:
    """Format a time in UTC, in seconds; an unknown time gives an empty text."""
    return time.strftime("%Y-%m-%d %H:%M:%S") if time is not None else ""
