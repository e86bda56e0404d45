"""The command ``python -m dlo_lib.train``, on one rank or on every rank that torchrun or srun starts.

Bad input gives one line from rank 0 and exit status 2 on every rank. A run that a signal stops early writes
its checkpoint and has status 75. In a deadlock, each rank prints its reason and exits with status 3.

srun and torchrun print alarms about ranks with a status other than 0. A job script reads from
``$DLO_PROGRESS`` that the run has stopped, so ranks in a job have status 0 then, and the script has 75.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import sys
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from dlo_lib.base import progress
from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError
from dlo_lib.base.lifetime import die_with
from dlo_lib.base.stop import EXIT_STOPPED, ignore_stop_requests
from dlo_lib.base.torch_version import check_torch
from dlo_lib.base.usage import run_app
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.launch import Place, explained, init_process_group, place
from dlo_lib.launch.place import in_shell_of_srun
from dlo_lib.train.config import Auto, TrainConfig, options
from dlo_lib.train.config_file import with_file
from dlo_lib.train.control import AgreedError, Control
from dlo_lib.train.loop import train

_IN_SHELL = "a shell of srun --pty runs one rank; `srun --overlap` before the command starts all of them"


def parse(arguments: list[str]) -> TrainConfig | None:
    """Parse the command line; return None for ``--help``, which prints the help.

    Raises:
        UserError: an option does not exist, a value is invalid, or the file of ``--config`` is.
    """
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command(help="Train a Llama on one rank, or on all that torchrun or srun starts.")(_command())
    config = run_app(app, "python -m dlo_lib.train", with_file(arguments))
    return config if isinstance(config, TrainConfig) else None


def _command() -> Any:
    """Create a function with one keyword parameter per field of TrainConfig, from which typer reads the
    options.
    """
    hints, said = get_type_hints(TrainConfig), options()
    parameters = []
    for option in fields(TrainConfig):
        kind, default, choices = hints[option.name], option.default, None
        if isinstance(default, enum.Enum):  # as text, because the error of TrainConfig lists the valid names
            kind, choices, default = str, "|".join(member.value for member in type(default)), default.value
        choices = "|".join(said[option.name].choices) or choices
        parser = None
        if option.name == "batch":
            kind, parser, choices = str, _batch, "INTEGER|auto"
        names = [name for name in (option.name.replace("_", "-"), said[option.name].also) if name is not None]
        declared = typer.Option(
            *(f"--{name}" for name in names), help=said[option.name].help, metavar=choices, parser=parser
        )
        parameters.append(
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, declared],
            )
        )

    from_file = "TOML file with options, such as dlo plan writes; the command line takes precedence"
    parameters.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option("--config", metavar="FILE", help=from_file)],
        )
    )
    said_at_once = (
        "explain a deadlock at once, with --explain also with the stack of every rank; "
        "--no-explain does not watch"
    )
    parameters.append(
        inspect.Parameter(
            "explain",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[bool | None, typer.Option("--explain/--no-explain", help=said_at_once)],
        )
    )

    def command(config: None, explain: bool | None, **options: Any) -> TrainConfig:
        # `with_file` has replaced --config, and `_explain` reads --explain before the process group exists.
        return TrainConfig(**options)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _batch(text: str) -> int | str:
    """Return the value of ``--batch``; typer turns a ``ValueError`` into a message."""
    return text if text == Auto.AUTO.value else int(text)


def main(arguments: list[str]) -> int:
    """Train; return the exit status."""
    try:
        check_torch()
        here = place()
        if here.world_size == 1 and in_shell_of_srun(os.environ):
            print(_IN_SHELL, file=sys.stderr, flush=True)
        if here.launcher == "torchrun":  # a killed torchrun leaves ranks that write to the resumed run
            die_with(os.getppid())
        with contextlib.ExitStack() as stack:
            stack.enter_context(explained(here, _explain(arguments)))
            if here.world_size > 1:
                stack.enter_context(init_process_group(here))
            return _train(arguments, here, stack.enter_context(Control()))
    except UserError as error:  # of this rank only, or before the process group exists
        return _say(str(error))


def _explain(arguments: list[str]) -> Explain:
    asked = [argument for argument in arguments if argument in ("--explain", "--no-explain")]
    return (
        {"--explain": Explain.STACKS, "--no-explain": Explain.OFF}[asked[-1]]
        if asked
        else Explain.from_environment()
    )


def _train(arguments: list[str], here: Place, control: Control) -> int:
    try:
        with control.together():
            config = parse(arguments) if here.rank == 0 else _silently(arguments)
        if config is not None and train(config).stopped:
            with control.together():  # srun ends the other ranks when one exits with a status other than 0
                return 0 if _script_knows(here) else EXIT_STOPPED
        return 0
    except AgreedError as error:
        if here.rank == 0:
            _say(str(error))
        with control.together():  # wait for rank 0 to print: a launcher ends all ranks when one exits
            return EXIT_BAD_INPUT


def _script_knows(here: Place) -> bool:
    """Whether a job script, not the status of its launcher, decides that this run has stopped."""
    return progress.DECIDES in os.environ and here.launcher in ("slurm", "torchrun")


def _silently(arguments: list[str]) -> TrainConfig | None:
    with contextlib.redirect_stdout(None):
        return parse(arguments)


def _say(message: str) -> int:
    print(f"dlo_lib.train: {message}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    status = main(sys.argv[1:])
    ignore_stop_requests()
    sys.exit(status)
