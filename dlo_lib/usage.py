"""Command lines whose bad input is one line and exit status 2, as everywhere here, instead of a frame of five."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from dlo_lib.errors import EXIT_BAD_INPUT, UserError

_UsageError: Any = typer.BadParameter.__base__  # of typer's own copy of click; it has no public name


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> Any:
    """What the command of ``app`` returns that ``arguments`` ask for, or the exit status with which it left.

    Args:
        program: as it is called in a shell.
        arguments: those of this process by default.

    Raises:
        UserError: an option or a command that does not exist, or a value that it cannot take.
    """
    try:
        return app(arguments, prog_name=program, standalone_mode=False)
    except _UsageError as error:
        said = error.format_message().strip().removesuffix(".").replace("Value error, ", "")
        if not said:  # nothing was asked for, so the help has been printed
            return EXIT_BAD_INPUT
        asked = error.ctx.command_path if error.ctx is not None else program
        raise UserError(said if said.endswith("?") else f"{said}; {asked} --help lists what there is") from error
