"""`python -m dlo_lib.kernels report`: registers, spills and shared memory of every kernel, without a GPU."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from dlo_lib.errors import unknown_name
from dlo_lib.kernels.cases import CASES
from dlo_lib.kernels.report import CAPABILITIES, compile_kernels
from dlo_lib.usage import leave_with

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def report(
    operation: Annotated[
        list[str] | None, typer.Option(help="compile only this operation; may be repeated")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"of the tensors: {', '.join(_DTYPES)}")] = "bf16",
) -> None:
    """Compile every kernel for sm_80 and sm_90, and print what a program of it allocates."""
    if dtype not in _DTYPES:
        raise unknown_name("dtype", dtype, _DTYPES)
    columns = ("operation", "kernel", "sm", "warps", "registers", "spilled bytes", "shared bytes")
    table = Table(*columns, title=f"kernels, compiled ahead of time for {dtype}")
    for made in compile_kernels(operation or tuple(CASES), CAPABILITIES, _DTYPES[dtype]):
        numbers = (made.capability, made.warps, made.registers, made.spilled_bytes, made.shared_bytes)
        table.add_row(made.operation, made.kernel, *map(str, numbers))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    """Run the command; exit with its status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # with one command, typer would leave out its name
    app.command()(report)
    leave_with(app, "python -m dlo_lib.kernels")


if __name__ == "__main__":
    main()
