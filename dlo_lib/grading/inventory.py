"""The inventory of a lab's collection: what became of each student's submission, with its receipt; as a table and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum

from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.tables import csv_text


class State(Enum):
    """What became of a student's submission."""

    NEW = "received"
    REPLACED = "received, replaces an earlier one"
    UNCHANGED = "received, unchanged"
    KEPT = "received before, now nothing newer"
    REFUSED = "refused"
    MISSING = "missing"
    UNKNOWN = "not of the roster"


@dataclass(frozen=True)
class Item:
    """A line of the inventory. ``late`` in seconds after the due date; ``notebook`` as the student called it; ``sha256`` is the receipt."""

    student: str
    state: State
    notebook: str = ""
    renamed: bool = False
    sha256: str = ""
    size: int = 0
    submitted: datetime | None = None
    late: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """One line for each student of the roster, in order, then one for each arrival that is nobody's."""

    lab: LabInfo
    items: tuple[Item, ...]

    def of(self, *states: State) -> list[Item]:
        """The lines in one of ``states``."""
        return [item for item in self.items if item.state in states]

    def csv(self) -> str:
        """The table, for a spreadsheet."""
        header = ["student", "state", "notebook", "renamed", "submitted_utc", "seconds_late", "bytes", "sha256", "notes"]
        rows = [
            [item.student, item.state.value, item.notebook, "yes" if item.renamed else "", shown_time(item.submitted), str(item.late or ""),
             str(item.size or ""), item.sha256, "; ".join(item.notes)]
            for item in self.items
        ]  # fmt: skip
        return csv_text(header, rows)

    def json(self) -> str:
        """The same for programs."""
        items = [{**asdict(item), "state": item.state.name, "submitted": shown_time(item.submitted)} for item in self.items]
        return json.dumps({"lab": self.lab.directory, "items": items}, indent=1)

    def receipts(self) -> str:
        """What students may see: notebook, size, time and receipt, a line for each submission."""
        received = [item for item in self.items if item.sha256]
        rows = [[item.student, item.notebook, str(item.size), shown_time(item.submitted), item.sha256] for item in received]
        return csv_text(["student", "notebook", "bytes", "submitted_utc", "sha256"], rows)


def shown_time(time: datetime | None) -> str:
    """To the second, in UTC; nothing when it is not known."""
    return time.strftime("%Y-%m-%d %H:%M:%S") if time is not None else ""
