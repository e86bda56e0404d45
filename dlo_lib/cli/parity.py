"""``dlo parity``: compare the trainer of another project with one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()


def parity(
    script: Annotated[
        Path, typer.Argument(help="file with build(), or a script of torchrun with two marked lines")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="arguments of a script of torchrun, after --", show_default=False),
    ] = None,
    ranks: Annotated[int, typer.Option(help="ranks of the trial", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="steps of the optimiser", min=1)] = 3,
    max_norm: Annotated[
        float | None,
        typer.Option(help="norm to which the trainer clips, if by other code than PyTorch's", min=0),
    ] = None,
    same_data: Annotated[
        bool,
        typer.Option("--same-data", help="ranks of a script of torchrun share the work on the same samples"),
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="seconds for the trial; default: no limit")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Find out whether a distributed trainer computes what one process computes, and which factor is wrong.

    The script offers build() -> model, optimizer, batches, which wraps the model where dist.is_initialized(),
    and may offer loss(model, batch), step(model, optimizer, batch) and MAX_NORM. In a script of torchrun, the
    line that assigns the model ends in "# parity: model", and the line that assigns the mean loss of a
    micro-batch in "# parity: loss". All is computed in float64, without dropout and autocast. The exit
    status is 1 if the trainer differs.
    """
    from dlo_lib.planner.parity import parity as compare

    running = f"running {steps} steps of {script.name} on {ranks} ranks ..."
    with console.status(running):
        report = compare(script, ranks, steps, arguments or (), max_norm, same_data, timeout)
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
        raise typer.Exit(0 if report.equal else 1)
    lines = [f"step {finding.step}, {finding.fault.value}: {finding.sentence}" for finding in report.findings]
    size = f"{report.steps} steps on {report.ranks} ranks in float64, {report.parameters} parameters"
    if report.equal:
        lines = [f"{size}: equal to one process; the largest relative difference is {report.largest:.1e}"]
    for line in [*lines, *report.notes]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(0 if report.equal else 1)
