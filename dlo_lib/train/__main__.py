"""``python -m dlo_lib.train --help``: the options of ``TrainConfig``, on every rank that torchrun or srun starts, or alone.

Bad input is one line from rank 0 and exit status 2 on every rank; a run that a signal stopped has status 0, its checkpoint being written.
When ranks wait for what can no longer happen, rank by rank it is said why, and all end with status 3.
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

from dlo_lib.comm.detail import Explain
from dlo_lib.errors import EXIT_BAD_INPUT, UserError
from dlo_lib.launch import Place, explained, init_process_group, place
from dlo_lib.launch.lifetime import die_with
from dlo_lib.train.config import TrainConfig, options
from dlo_lib.train.control import AgreedError, Control
from dlo_lib.train.loop import train
from dlo_lib.usage import run_app


def parse(arguments: list[str]) -> TrainConfig | None:
    """The configuration that the command line asks for; None when it asked for help, which is printed.

    Raises:
        UserError: an option that does not exist, or a value that it cannot take.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(help="Train a Llama on one rank, or on all that torchrun or srun starts.")(_command())
    config = run_app(app, "python -m dlo_lib.train", arguments)
    return config if isinstance(config, TrainConfig) else None


def _command() -> Any:
    """A function with one keyword parameter per field of TrainConfig: typer reads signatures, so the options are written once."""
    hints, said = get_type_hints(TrainConfig), options()
    parameters = []
    for option in fields(TrainConfig):
        kind, default, choices = hints[option.name], option.default, None
        if isinstance(default, enum.Enum):  # as text: TrainConfig knows how to say which names there are
            kind, choices, default = str, "|".join(member.value for member in type(default)), default.value
        names = [name for name in (option.name.replace("_", "-"), said[option.name].also) if name is not None]
        declared = typer.Option(*(f"--{name}" for name in names), help=said[option.name].help, metavar=choices)
        parameters.append(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared])
        )

    said_at_once = "when ranks wait for ever, say why at once, with --explain every rank's Python stack too; --no-explain does not watch"
    parameters.append(
        inspect.Parameter(
            "explain",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[bool | None, typer.Option("--explain/--no-explain", help=said_at_once)],
        )
    )

    def command(explain: bool | None, **options: Any) -> TrainConfig:
        return TrainConfig(**options)  # how much is explained is no part of what is trained, and known before the ranks meet (_explain)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def main(arguments: list[str]) -> int:
    """Train; return the exit status."""
    try:
        here = place()
        if here.launcher == "torchrun":  # killed, it leaves its ranks behind: they would go on writing where the next run resumes
            die_with(os.getppid())
        with contextlib.ExitStack() as stack:
            stack.enter_context(explained(here, _explain(arguments)))
            if here.world_size > 1:
                stack.enter_context(init_process_group(here))
            return _train(arguments, here, stack.enter_context(Control()))
    except UserError as error:  # of this rank alone, or before the ranks have met
        return _say(str(error))


def _explain(arguments: list[str]) -> Explain:
    asked = [argument for argument in arguments if argument in ("--explain", "--no-explain")]
    return {"--explain": Explain.STACKS, "--no-explain": Explain.OFF}[asked[-1]] if asked else Explain.from_environment()


def _train(arguments: list[str], here: Place, control: Control) -> int:
    try:
        with control.together():
            config = parse(arguments) if here.rank == 0 else _silently(arguments)
        if config is not None:
            train(config)
        return 0
    except AgreedError as error:
        if here.rank == 0:
            _say(str(error))
        with control.together():  # nobody leaves before it is said: a launcher ends the others as soon as one leaves
            return EXIT_BAD_INPUT


def _silently(arguments: list[str]) -> TrainConfig | None:
    with contextlib.redirect_stdout(None):
        return parse(arguments)


def _say(message: str) -> int:
    print(f"dlo_lib.train: {message}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
