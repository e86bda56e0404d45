"""Compare runs in a table, read from the event files of TensorBoard and from MLflow.

    table = compare_runs("runs", {"test/accuracy": Pick.HIGHEST}, settings=["lr", "batch"])
    table.where(batch=32).sorted("test/accuracy")

A run is a folder with event files, which any program may have written, or a folder with the record of
``tracking``. Its name is its path below the folder that is read. A column takes one number from the curve of
a run: its last, lowest or highest value. If a run has a record, the table says which runs are not
reproducible, and what their records lack.

Cost: each call reads the files, in 0.1 s for a thousand points. MLflow needs some seconds to import."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.markup import render
from dlo_lib.base.provenance import Provenance
from dlo_lib.base.text import tr
from dlo_lib.train.tracking import EVENTS, RECORD, RunRecord, Tracking, read_record


class Pick(enum.Enum):
    """The value of a curve that the table shows."""

    LAST = "last"
    LOWEST = "lowest"
    HIGHEST = "highest"


@dataclass(frozen=True)
class RunScalars:
    """A run.

    Attributes:
        name: its path below the folder that was read.
        scalars: its curves by tag, points (step, value) in the order of the file.
        provenance: its record; None if it has none.
    """

    name: str
    scalars: Mapping[str, Sequence[tuple[int, float]]]
    provenance: Provenance | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the record; empty if there is none."""
        config = self.provenance.config if self.provenance is not None else None
        return config if isinstance(config, Mapping) else {}

    @property
    def missing(self) -> tuple[str, ...]:
        """What its record lacks; empty if the run is reproducible."""
        return (self.provenance or Provenance()).missing

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
    """Runs and one value of each of their curves. A notebook shows a table, ``print`` shows text.

    The best value of a column is marked.

    Attributes:
        columns: tags of curves, and the value that is shown.
        runs: the rows.
        settings: names of settings that are shown.
    """

    columns: Mapping[str, Pick]
    runs: tuple[RunScalars, ...]
    settings: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, tuple[float, ...]]:
        """The values of the columns by the name of the run; NaN if a run has no such curve."""
        return {
            run.name: tuple(run.pick(tag, pick) for tag, pick in self.columns.items()) for run in self.runs
        }

    def where(self, condition: Callable[[RunScalars], bool] | None = None, **settings: Any) -> RunTable:
        """Return the table of the runs that fulfil ``condition`` and have the values of ``settings``.

        Raises:
            UserError: there is no such run.
        """
        kept = tuple(
            run
            for run in self.runs
            if (condition is None or condition(run))
            and all(name in run.settings and run.settings[name] == value for name, value in settings.items())
        )
        if not kept:
            raise UserError("no run of the table fulfils this condition: leave out a part of it")
        return replace(self, runs=kept)

    def sorted(self, by: str, descending: bool | None = None) -> RunTable:
        """Return the table with its rows in the order of a column.

        Args:
            by: a curve or a setting. Runs without it are last.
            descending: None for True with the highest values of a curve, otherwise False.

        Raises:
            UserError: the table has no such column.
        """
        if by not in self.columns and by not in self.settings:
            raise unknown_name("column", by, [*self.columns, *self.settings])
        downwards = self.columns.get(by) is Pick.HIGHEST if descending is None else descending
        having, lacking = list[tuple[Any, RunScalars]](), list[RunScalars]()
        for run in self.runs:
            value = run.pick(by, self.columns[by]) if by in self.columns else run.settings.get(by)
            if value is None or value != value:
                lacking.append(run)
            else:
                having.append((value if isinstance(value, (int, float)) else str(value), run))
        having.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=downwards)
        return replace(self, runs=(*(run for _, run in having), *lacking))

    def __str__(self) -> str:
        lines = [[f"{text} *" if best else text for text, best in cells] for cells in self._cells()]
        cells = [self._titles(), *lines]
        widths = [max(map(len, column)) for column in zip(*cells)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in cells
        )

    def _repr_html_(self) -> str:
        rows = [(cells[0][0], cells[1:]) for cells in self._cells()]
        return render("runs", titles=self._titles(), rows=rows)

    @property
    def _are_recorded(self) -> bool:
        return any(run.provenance is not None for run in self.runs)

    def _titles(self) -> list[str]:
        shown = [f"{pick.value} {tag}" for tag, pick in self.columns.items()]
        return ["run", *self.settings, *shown, *([tr("not reproducible")] if self._are_recorded else [])]

    def _cells(self) -> list[list[tuple[str, bool]]]:
        """Return the texts of each row, and whether each is the best value of its column.

        The best value is the minimum for LOWEST and the maximum for HIGHEST.
        """
        best: list[float | None] = []
        for pick, column in zip(self.columns.values(), zip(*self.rows.values())):
            finite = [value for value in column if math.isfinite(value)]
            best.append(
                {Pick.LOWEST: min, Pick.HIGHEST: max}[pick](finite)
                if finite and pick is not Pick.LAST
                else None
            )
        rows = []
        for run, values in zip(self.runs, self.rows.values()):
            cells = [(run.name, False)]
            cells += [(_text(run.settings.get(name)), False) for name in self.settings]
            cells += [(f"{value:.4g}", value == top) for value, top in zip(values, best)]
            if self._are_recorded:
                lacks = ", ".join(run.missing)
                cells.append((tr("no {missing}", missing=lacks) if lacks else "", False))
            rows.append(cells)
        return rows


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def read_runs(folder: str | Path) -> list[RunScalars]:
    """Read all runs below ``folder``, sorted by name.

    Raises:
        UserError: there are no runs, or the package that wrote one is missing.
    """
    root = Path(folder)
    places = {file.parent for file in root.rglob("*tfevents*")}
    runs = []
    for place in places:
        # the folder of a run of `tracking`, and of the training command
        owner = place.parent if place.name == EVENTS and (place.parent / RECORD).is_file() else place
        record = read_record(owner)
        runs.append(RunScalars(_name(owner, root), _event_curves(place), _provenance(record)))
    for file in root.rglob(RECORD):
        record = read_record(file.parent)
        if record is not None and record.tracking is Tracking.MLFLOW and record.mlflow_id is not None:
            from dlo_lib.train.mlflow_store import FILE, read_curves

            curves = read_curves(file.parent.parent / FILE, record.mlflow_id)
            runs.append(RunScalars(_name(file.parent, root), curves, record.provenance))
    if not runs:
        raise UserError(f"no event files below {root}: give the folder of one or several runs")
    return sorted(runs, key=lambda run: run.name)


def _name(place: Path, root: Path) -> str:
    return root.resolve().name if place == root else str(place.relative_to(root))


def _provenance(record: RunRecord | None) -> Provenance | None:
    return None if record is None else record.provenance


def _event_curves(place: Path) -> dict[str, list[tuple[int, float]]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UserError("reading runs needs the package tensorboard: pip install tensorboard") from error
    events = EventAccumulator(str(place), size_guidance={"scalars": 0})  # 0 keeps every point
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def compare_runs(folder: str | Path, columns: Mapping[str, Pick], settings: Sequence[str] = ()) -> RunTable:
    """Return a table of the runs below ``folder``.

    Args:
        columns: tags of curves, each with the value to show.
        settings: names of settings to show, from the records of the runs.

    Raises:
        UserError: there are no runs, or no run has a tag or a setting.
    """
    runs = read_runs(folder)
    known = {tag for run in runs for tag in run.scalars}
    named = {name for run in runs for name in run.settings}
    for tag in columns:
        if tag not in known:
            raise unknown_name("curve", tag, known)
    for name in settings:
        if name not in named:
            raise unknown_name("setting", name, named)
    return RunTable(dict(columns), tuple(runs), tuple(settings))
