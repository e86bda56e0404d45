"""Runs side by side, read from TensorBoard's event files: what its dashboard draws, as a table in a notebook.

A run is a folder that holds event files, whoever wrote them; its name is its path below the folder that is read. A column takes one number
from a run's curve: its last value, its lowest or its highest. Cost: the files are read anew each time, 0.1 s for a thousand points.
"""

from __future__ import annotations

import enum
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.errors import UserError, unknown_name


class Pick(enum.Enum):
    """Which value of a curve stands in the table."""

    LAST = "last"
    LOWEST = "lowest"
    HIGHEST = "highest"


@dataclass(frozen=True)
class Run:
    """``scalars[tag]`` is a curve, (step, value) in the order of the file."""

    name: str
    scalars: Mapping[str, Sequence[tuple[int, float]]]

    def pick(self, tag: str, pick: Pick) -> float:
        """NaN where the run has no such curve; values that are no numbers count in LAST only."""
        values = [value for _, value in self.scalars.get(tag, ())]
        if pick is Pick.LAST or not values:
            return values[-1] if values else math.nan
        finite = [value for value in values if math.isfinite(value)]
        return (min if pick is Pick.LOWEST else max)(finite, default=math.nan)


@dataclass(frozen=True)
class RunTable:
    """Names of runs and their numbers; a notebook shows it as a table, ``print`` as text. The best of each column is marked."""

    columns: Mapping[str, Pick]
    rows: Mapping[str, tuple[float, ...]]

    def __str__(self) -> str:
        cells = [["run", *self._titles()], *self._marked("", " *")]
        widths = [max(map(len, column)) for column in zip(*cells)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(title)}</th>" for title in ["run", *self._titles()])
        body = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
            for name, *cells in self._marked("<b>", "</b>")
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _titles(self) -> list[str]:
        return [f"{pick.value} {tag}" for tag, pick in self.columns.items()]

    def _marked(self, before: str, after: str) -> list[list[str]]:
        """Rows of text; a column of lowest values is best where it is lowest, one of highest values where it is highest."""
        best = []
        for pick, column in zip(self.columns.values(), zip(*self.rows.values())):
            finite = [value for value in column if math.isfinite(value)]
            best.append({Pick.LOWEST: min, Pick.HIGHEST: max}[pick](finite) if finite and pick is not Pick.LAST else None)

        def text(value: float, top: float | None) -> str:
            return f"{before}{value:.4g}{after}" if value == top else f"{value:.4g}"

        return [[name, *(text(value, top) for value, top in zip(values, best))] for name, values in self.rows.items()]


def read_runs(folder: str | Path) -> list[Run]:
    """All runs below ``folder``, by name.

    Raises:
        UserError: there are none, or the package tensorboard is missing.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UserError("runs are read with the package tensorboard: pip install tensorboard") from error
    root = Path(folder)
    runs = []
    for place in sorted({file.parent for file in root.rglob("*tfevents*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})  # 0 keeps every point
        events.Reload()
        scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        runs.append(Run(str(place.relative_to(root)), scalars))
    if not runs:
        raise UserError(f"no event files below {root}: give the folder that a run, or several, were written to")
    return runs


def compare_runs(folder: str | Path, columns: Mapping[str, Pick]) -> RunTable:
    """The runs below ``folder`` as a table, a column for each tag.

    Raises:
        UserError: no runs, or a tag that none of them has.
    """
    runs = read_runs(folder)
    known = {tag for run in runs for tag in run.scalars}
    for tag in columns:
        if tag not in known:
            raise unknown_name("curve", tag, known)
    return RunTable(dict(columns), {run.name: tuple(run.pick(tag, pick) for tag, pick in columns.items()) for run in runs})
