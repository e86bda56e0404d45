"""The table of `dlo jobs`: which jobs it has, and one line for each, which fits a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.markup import escape
from rich.table import Table

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster import Job, State
from dlo_lib.cluster.job.handle import jobs as submitted
from dlo_lib.cluster.run import records
from dlo_lib.cluster.run.records import Record
from dlo_lib.cluster.script.work import CHECKPOINTS
from dlo_lib.cluster.site.cost import hours_of
from dlo_lib.cluster.slurm.states import ElementStatus, summary
from dlo_lib.cluster.view.views import local_time, sweep_text

_UNITS = {"min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_ARGUMENTS = re.compile(r"^arguments=\((.*)\)$", re.MULTILINE)
_LEAST = {"name": 8, "site": 8, "number": 7, "state": 9, "settings": 8}
"""Columns that are made narrower to fit the terminal, and their least width."""
_EXPLAINED = (State.FAILED, State.OUT_OF_MEMORY, State.LOST, State.STOPPED, State.UNKNOWN)
"""States whose reason is shown below the table."""


@dataclass(frozen=True)
class JobRow:
    """A job and the statuses of its elements."""

    job: Job
    record: Record
    statuses: Sequence[ElementStatus]

    @property
    def short(self) -> str:
        """The digits of the job that a user types."""
        return self.record.digest[: records.SHORT]

    @property
    def reason(self) -> str:
        """Why the first element that needs an explanation is in its state; "" if none does."""
        found = (one.reason for one in self.statuses if one.state in _EXPLAINED and one.reason)
        return next(found, "")

    @property
    def elapsed(self) -> str:
        """The longest run time of its elements, in SLURM's format."""
        return max((one.elapsed for one in self.statuses), key=hours_of, default="")

    @property
    def settings(self) -> str:
        """What its sweep varies, or the arguments of its program."""
        if text := sweep_text(self.record.settings):
            return text
        found = _ARGUMENTS.search(self.job.script)
        words = found[1] if found else ""
        for added in ("--resume", " ".join(CHECKPOINTS)):  # by the submission of a training
            words = words.replace(f" {added}", "")
        return words

    def plain(self) -> dict[str, Any]:
        """Return the row for programs."""
        record = self.record
        return {
            "job": self.short,
            "name": record.queue_name,
            "site": record.site,
            "gpus": record.gpus,
            "numbers": [turn.number for turn in record.turns if not turn.given_up],
            "submitted": record.submitted,
            "state": summary(self.statuses),
            "reason": self.reason,
            "elapsed": self.elapsed,
            "settings": list(record.settings),
        }


def states_of(names: Sequence[str]) -> set[State]:
    """Return the states with these names, such as ``failed`` and ``out-of-memory``.

    Raises:
        UserError: there is no such state.
    """
    known = {state.value.replace(" ", "-"): state for state in State}
    for name in names:
        if name.lower().replace(" ", "-") not in known:
            raise unknown_name("state", name, known)
    return {known[name.lower().replace(" ", "-")] for name in names}


def start_of(text: str | None) -> datetime | None:
    """Return the time from which jobs are listed; None for all.

    Args:
        text: a day or a time in the zone of this machine, or how long ago: ``90min``, ``12h``, ``7d``.

    Raises:
        UserError: it has another form.
    """
    if text is None:
        return None
    if ago := re.fullmatch(rf"(\d+) ?({'|'.join(_UNITS)})", text.strip()):
        return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except ValueError as error:
        said = "--since is {text}: write a day (2026-11-20), a time (2026-11-20T14:00), or 90min, 12h, 7d, 2w"
        raise UserError(tr(said, text=text)) from error


def chosen(states: set[State], last: int | None, since: datetime | None) -> list[JobRow]:
    """Return the rows of the jobs that a user asks for, the newest last.

    SLURM is asked only about these jobs, and not about those that have ended.

    Args:
        states: those of an element; empty: all.
        last: the number of jobs; None: all.
        since: the time of their submission.
    """
    found: list[JobRow] = []
    for job in reversed(submitted()):
        record = job.record
        if since is not None and datetime.fromisoformat(record.submitted) < since:
            continue
        statuses = job.status()
        if not states or any(one.state in states for one in statuses):
            found.append(JobRow(job, record, statuses))
        if len(found) == last:
            break
    return found[::-1]


def table(rows: Sequence[JobRow], width: int) -> Table:
    """Return the table.

    Args:
        width: of the terminal. Names and settings that do not fit are cut, states are broken into lines.
    """
    heads = ("job", "name", "site", "GPUs", "number", "submitted", "state", "elapsed", "settings")
    cells = [
        (
            row.short,
            row.record.name,
            row.record.site,
            str(row.record.gpus),
            row.record.numbers,
            local_time(row.record.submitted)[5:],
            summary(row.statuses),
            row.elapsed,
            row.settings,
        )
        for row in rows
    ]
    of_sites = len({row.record.site for row in rows}) > 1
    kept = [place for place, head in enumerate(heads) if head != "site" or of_sites]
    widths = {heads[place]: max(len(line[place]) for line in (heads, *cells)) for place in kept}
    while sum(widths.values()) + 2 * (len(widths) - 1) > width:
        widest = max(
            (head for head in _LEAST if head in widths), key=lambda head: widths[head] - _LEAST[head]
        )
        if widths[widest] <= _LEAST[widest]:
            break
        widths[widest] -= 1
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for head, size in widths.items():
        right = head in ("GPUs", "elapsed")
        shown.add_column(
            head,
            width=size,
            no_wrap=head != "state",
            overflow="ellipsis",
            justify="right" if right else "left",
        )
    for line in cells:
        shown.add_row(*(escape(line[place]) for place in kept))
    return shown


def reasons(rows: Sequence[JobRow]) -> Iterator[str]:
    """Yield a line for each job with a reason."""
    for row in rows:
        if row.reason:
            yield tr("{job}: {reason}", job=row.short, reason=row.reason)
