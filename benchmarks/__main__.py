"""`python -m benchmarks NAME [--json]`: each NAME is a module of this package with a function
``rows(pairs)``, which yields ``Row``s.

Each row is printed to standard error as soon as it is measured, so that an interrupted run has results. The
run first prints the number of rows (``ROWS``) and the total time, if the module has ``SECONDS``: the time of
a row on two idle cores, as a constant and a time for each pair. After each row it prints the estimated time
of the remaining rows.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.paired import Row
from dlo_lib.base.errors import unknown_name
from dlo_lib.base.usage import leave_with

_WIDTH = 180  # the width of a table that is redirected to a file
HARNESS = {
    "bombs", "paired", "peaks", "phrasings", "planner_fit", "planner_published", "planted_class", "replay",
    "sleeping", "__main__",
}  # fmt: skip


def names() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    # Those of a GPU are commands: they measure with CUDA events and write into a folder.
    return sorted(name for name in found if name not in HARNESS and not name.startswith("card_"))


def run(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(names())}")],
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
    pairs: Annotated[
        int | None,
        typer.Option(help="the number of pairs; the default depends on the benchmark", min=1),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="planner: predicted against measured steps of this machine")
    ] = False,
) -> None:
    """Measure ours and the peer alternately, and print the ratios ours / peer with their quartiles."""
    if measure:
        name = f"{name}_measured"
    if name not in names():
        raise unknown_name("benchmark", name, names())
    module = importlib.import_module(f"benchmarks.{name}")
    rows: list[Row] = []
    count = inspect.signature(module.rows).parameters["pairs"].default if pairs is None else pairs
    print(announced(name, count, module.ROWS, getattr(module, "SECONDS", None)), file=sys.stderr)
    began = time.monotonic()
    for row in module.rows(count):
        rows.append(row)
        measured = ", ".join(f"{name} {ratio}" for name, ratio in row.ratios().items() if ratio is not None)
        parts = [part for part in (measured, row.note) if part]
        print(f"{row.name} on {row.world_size}: {'; '.join(parts)}", file=sys.stderr)
        if len(rows) < module.ROWS:
            print(progress(len(rows), module.ROWS, time.monotonic() - began), file=sys.stderr)
    if as_json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
        return
    columns = ("name", "peer", "ranks", "time", "CPU", "memory", "floor", "note")
    table = Table(*columns, title=f"ours / peer: {name}")
    for row in rows:
        shown = ("–" if ratio is None else str(ratio) for ratio in row.ratios().values())
        table.add_row(row.name, row.peer, str(row.world_size), *shown, row.note)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def announced(name: str, pairs: int, rows: int, seconds: tuple[float, float] | None) -> str:
    """Return the line before the first row; ``seconds`` is the time of a row, as a constant and a time per
    pair."""
    size = f"{name}: {rows} rows of {pairs} pairs"
    if seconds is None:
        return f"{size}; the remaining time is printed after the first row"
    return f"{size}, about {_minutes(rows * (seconds[0] + seconds[1] * pairs))} on two idle cores"


def progress(done: int, rows: int, seconds: float) -> str:
    """Return the line after each row except the last; ``seconds`` is the time since the start."""
    remaining = _minutes(seconds / done * (rows - done))
    return f"  {done} of {rows} rows in {_minutes(seconds)}; the others take about {remaining}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    leave_with(app, "python -m benchmarks")


if __name__ == "__main__":
    main()
