"""Compare runs in a table, read from the event files of TensorBoard.

A run is a folder with event files, which any program may have written. Its name is its path below the folder
that is read. A column takes one number from the curve of a run: its last, lowest or highest value. Cost: each
call reads the files, in 0.1 s for a thousand points."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.markup import render


class Pick(enum.Enum):
    """The value of a curve that the table shows."""

    LAST = "last"
    LOWEST = "lowest"
    HIGHEST = "highest"


@dataclass(frozen=True)
class RunScalars:
    """A run; ``scalars[tag]`` is a curve, (step, value) in the order of the file."""

    name: str
    scalars: Mapping[str, Sequence[tuple[int, float]]]

    def pick(self, tag: str, pick: Pick) -> float:
        """Return one value of a curve; NaN if the run has no such curve.

        Only LAST considers non-finite values.
        """
        values = [value for _, value in self.scalars.get(tag, ())]
        if pick is Pick.LAST or not values:
            return values[-1] if values else math.nan
        finite = [value for value in values if math.isfinite(value)]
        return (min if pick is Pick.LOWEST else max)(finite, default=math.nan)


@dataclass(frozen=True)
class RunTable:
    """Names of runs and their values.

    A notebook shows a table, ``print`` shows text. The best value of a column is marked.
    """

    columns: Mapping[str, Pick]
    rows: Mapping[str, tuple[float, ...]]

    def __str__(self) -> str:
        marked = [
            [name, *(f"{text} *" if best else text for text, best in cells)] for name, cells in self._cells()
        ]
        cells = [["run", *self._titles()], *marked]
        widths = [max(map(len, column)) for column in zip(*cells)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in cells
        )

    def _repr_html_(self) -> str:
        return render("runs", titles=["run", *self._titles()], rows=self._cells())

    def _titles(self) -> list[str]:
        return [f"{pick.value} {tag}" for tag, pick in self.columns.items()]

    def _cells(self) -> list[tuple[str, list[tuple[str, bool]]]]:
        """Return for each run the texts of its numbers, and whether each is the best of its column.

        The best value is the minimum for LOWEST and the maximum for HIGHEST.
        """
        best = []
        for pick, column in zip(self.columns.values(), zip(*self.rows.values())):
            finite = [value for value in column if math.isfinite(value)]
            best.append(
                {Pick.LOWEST: min, Pick.HIGHEST: max}[pick](finite)
                if finite and pick is not Pick.LAST
                else None
            )

        return [
            (name, [(f"{value:.4g}", value == top) for value, top in zip(values, best)])
            for name, values in self.rows.items()
        ]


def read_runs(folder: str | Path) -> list[RunScalars]:
    """Read all runs below ``folder``, sorted by name.

    Raises:
        UserError: there are no runs, or the package tensorboard is missing.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UserError("reading runs needs the package tensorboard: pip install tensorboard") from error
    root = Path(folder)
    runs = []
    for place in sorted({file.parent for file in root.rglob("*tfevents*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})  # 0 keeps every point
        events.Reload()
        scalars = {
            tag: [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
        runs.append(RunScalars(str(place.relative_to(root)), scalars))
    if not runs:
        raise UserError(f"no event files below {root}: give the folder of one or several runs")
    return runs


def compare_runs(folder: str | Path, columns: Mapping[str, Pick]) -> RunTable:
    """Return a table of the runs below ``folder`` with one column for each tag.

    Raises:
        UserError: there are no runs, or no run has a tag.
    """
    runs = read_runs(folder)
    known = {tag for run in runs for tag in run.scalars}
    for tag in columns:
        if tag not in known:
            raise unknown_name("curve", tag, known)
    return RunTable(
        dict(columns), {run.name: tuple(run.pick(tag, pick) for tag, pick in columns.items()) for run in runs}
    )
