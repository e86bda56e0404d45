"""Run typer commands so that bad input gives one line and exit status 2 instead of typer's frame of five
lines.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError

_UsageError: Any = typer.BadParameter.__base__  # the class of typer's copy of click has no public name


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> Any:
    """Run the command of ``app`` that ``arguments`` select; return its result or its exit status.

    Args:
        program: the name of the program in a shell.
        arguments: the arguments; None takes those of this process.

    Raises:
        UserError: an option or a command does not exist, or a value is invalid.
    """
    try:
        return app(arguments, prog_name=program, standalone_mode=False)
    except _UsageError as error:
        said = error.format_message().strip().removesuffix(".").replace("Value error, ", "")
        if not said:  # no command was given, so typer has printed the help
            return EXIT_BAD_INPUT
        asked = error.ctx.command_path if error.ctx is not None else program
        raise UserError(
            said if said.endswith("?") else f"{said}; {asked} --help lists the options"
        ) from error


def leave_with(app: typer.Typer, program: str) -> NoReturn:
    """Run ``app`` with the arguments of this process and exit with its status; a UserError is printed as one
    line. A character that the locale cannot encode is printed as a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        status = run_app(app, program)
    except UserError as error:
        print(f"{program.split()[-1]}: {error}", file=sys.stderr)
        status = EXIT_BAD_INPUT
    sys.exit(status if isinstance(status, int) else 0)
