"""`python -m benchmarks NAME [--json]`: one module of this package per NAME, with ``rows(pairs)``, which gives ``Row``s.

Each row goes to standard error as soon as it is measured, so that a run that is stopped has not been for nothing.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.paired import Row
from dlo_lib.errors import EXIT_BAD_INPUT, UserError, unknown_name
from dlo_lib.usage import run_app

_WIDTH = 180  # of a table in a file
HARNESS = {"paired", "peaks", "replay", "sleeping", "__main__"}


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in HARNESS)


def run(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(names())}")],
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
    pairs: Annotated[int | None, typer.Option(help="turns of each; each benchmark has its own default", min=1)] = None,
) -> None:
    """Measure ours against the peer, in turns, and print the ratios ours / peer with their quartiles."""
    if name not in names():
        raise unknown_name("benchmark", name, names())
    module = importlib.import_module(f"benchmarks.{name}")
    rows: list[Row] = []
    for row in module.rows() if pairs is None else module.rows(pairs):
        rows.append(row)
        measured = ", ".join(f"{name} {figure}" for name, figure in row.ratios().items() if figure is not None)
        print("; ".join(part for part in (f"{row.name} on {row.world_size}: {measured}", row.note) if part), file=sys.stderr)
    if as_json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
        return
    table = Table("name", "peer", "ranks", "time", "CPU", "memory", "floor", "note", title=f"ours / peer: {name}")
    for row in rows:
        shown = ("–" if figure is None else str(figure) for figure in row.ratios().values())
        table.add_row(row.name, row.peer, str(row.world_size), *shown, row.note)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    try:
        status = run_app(app, "python -m benchmarks")
        sys.exit(status if isinstance(status, int) else 0)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
