"""`python -m dlo_lib.kernels report`: what each kernel needs on each architecture, without a GPU."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dlo_lib.base.errors import unknown_name
from dlo_lib.base.usage import leave_with
from dlo_lib.kernels.cases import CASES, SIZES
from dlo_lib.kernels.record import DTYPES, update
from dlo_lib.kernels.report import CAPABILITIES, CompiledKernel, compile_kernels, compile_part

_COLUMNS = {
    "operation": lambda made: made.operation,
    "kernel": lambda made: made.kernel,
    "sm": lambda made: str(made.capability),
    "warps": lambda made: str(made.warps),
    "registers": lambda made: str(made.registers),
    "spilled": lambda made: str(made.spilled_bytes),
    "shared": lambda made: str(made.shared_bytes),
    "MB": lambda made: f"{made.moved_bytes / 1e6:.1f}",
    "GFLOP": lambda made: f"{made.operations / 1e9:.1f}" if made.operations else "–",
    "floor, us": lambda made: "–" if made.floor_us() is None else f"{made.floor_us():.1f}",
    "instructions": lambda made: ", ".join(made.instructions),
}


def report(
    operation: Annotated[
        list[str] | None, typer.Option(help="compile only this operation; may be repeated")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"of the tensors: {', '.join(DTYPES)}")] = "bf16",
    sm: Annotated[
        list[int] | None, typer.Option(help="compile only for this compute capability; may be repeated")
    ] = None,
    size: Annotated[str, typer.Option(help=f"of the tensors: {', '.join(SIZES)}")] = "3b",
    ptx: Annotated[Path | None, typer.Option(help="keep the PTX of each kernel in this folder")] = None,
    jobs: Annotated[int, typer.Option(help="processes that compile at the same time", min=1)] = 1,
    record: Annotated[
        Path | None, typer.Option(help="compile all kernels that this file does not have, and write it")
    ] = None,
) -> None:
    """Compile every kernel ahead of time, and print what a program of it allocates.

    The exit status is 1 if a kernel spills registers or needs more shared memory than the architecture has.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if record is not None:
        problems = [*update(record, jobs)]
        print("\n".join(problems) or f"{record} has all kernels: none spills, and all fit")
        raise typer.Exit(bool(problems))
    table = Table(*_COLUMNS, title=f"kernels, compiled ahead of time for {dtype}, size {size}")
    problems = []
    kept: Counter[str] = Counter()
    for made in _compiled(operation or tuple(CASES), sm or CAPABILITIES, dtype, size, jobs):
        table.add_row(*(text(made) for text in _COLUMNS.values()))
        if made.problem:
            problems.append(made.problem)
        if ptx is not None:
            ptx.mkdir(parents=True, exist_ok=True)
            name = f"{made.operation}-{made.kernel}-sm_{made.capability}-{dtype}-{size}".replace(", ", "-")
            kept[name] += 1  # an operation may start a kernel with several layouts
            number = f"-{kept[name]}" if kept[name] > 1 else ""
            (ptx / f"{name}{number}.ptx").write_text(made.ptx, encoding="utf-8")
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)


def _compiled(
    operations: Sequence[str], capabilities: Sequence[int], dtype: str, size: str, jobs: int
) -> Iterator[CompiledKernel]:
    if jobs == 1:
        yield from compile_kernels(operations, capabilities, DTYPES[dtype], size)
        return
    # Processes, because Triton's passes hold the interpreter lock.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [
            pool.submit(compile_part, name, capability, DTYPES[dtype], size)
            for name, capability in itertools.product(operations, capabilities)
        ]
        for part in parts:
            yield from part.result()


def main() -> None:
    """Run the command; exit with its status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # with one command, typer would leave out its name
    app.command()(report)
    leave_with(app, "python -m dlo_lib.kernels")


if __name__ == "__main__":
    main()
