"""What a job runs: Python on every rank, or a command once.

And its arguments, one tuple per element of a sweep.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.stop import EXIT_STOPPED
from dlo_lib.base.text import tr

TRAINING = "dlo_lib.train"
"""The module that stops with a checkpoint on request, and resumes with ``--resume``."""

DECLARATION = "HANDLES_STOP"
_DECLARED = re.compile(rf"^{DECLARATION}\s*(?::\s*\w+\s*)?=\s*(?:True|true|1)\b", re.MULTILINE)

CHECKPOINTS = ("--checkpoint-minutes", "10")
"""Arguments of a training in a job, so that a failed node loses minutes and not the run."""

Sweep = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
"""Values to combine in all ways, or a list of combinations."""


@dataclass(frozen=True)
class OnRanks:
    """Python on every rank; ``program`` holds the arguments of the interpreter: ``-m module`` or a file."""

    program: tuple[str, ...]

    @property
    def trains(self) -> bool:
        """Whether the job is a training run of this library."""
        return self.program == ("-m", TRAINING)


@dataclass(frozen=True)
class Once:
    """A command that runs once in each job, on its first node."""

    command: tuple[str, ...]

    @property
    def trains(self) -> bool:
        """Always False."""
        return False


Work = OnRanks | Once


def work_of(what: str | Path | Sequence[str]) -> Work:
    """Return the work that a file, a module's name or a command stands for.

    Raises:
        UserError: there is no such file or module.
    """
    if not isinstance(what, (str, Path)):
        if not what:
            raise UserError(tr("the command is empty: give the program and its arguments"))
        return Once(tuple(map(str, what)))
    text = str(what)
    file = Path(text).expanduser()
    if file.suffix in (".py", ".sh", ".bash", ".sbatch") or "/" in text:
        if not file.is_file():
            raise UserError(tr("no file {file} in {folder}: check the path", file=file, folder=Path.cwd()))
        path = str(file.resolve())
        return OnRanks((path,)) if file.suffix == ".py" else Once(("bash", path))
    try:
        found = importlib.util.find_spec(text) is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        raise UserError(
            tr(
                'no module "{name}" in this environment: '
                "give a module, a .py file, a shell script or a function",
                name=text,
            )
        )
    return OnRanks(("-m", text))


def refuse_requeue(what: str | Path | Sequence[str] | Callable[..., Any], work: Work) -> None:
    """Check that a program handles the signal that asks it to stop, so that it may be requeued.

    Training with this library does. A program of the user declares it: a function by the attribute
    ``HANDLES_STOP``, a module, a ``.py`` file or a shell script by a line ``HANDLES_STOP = True`` (in a shell
    script ``HANDLES_STOP=true``). The line is read, not run. A command cannot declare it.

    Raises:
        UserError: the program does not declare that it handles the signal.
    """
    if work.trains:
        return
    if callable(what):
        handles, line = bool(getattr(what, DECLARATION, False)), f"{name_of(what)}.{DECLARATION} = True"
    else:
        source = _source(work)
        handles = source is not None and _DECLARED.search(source.read_text(errors="replace")) is not None
        line = f"{DECLARATION} = True" if isinstance(work, OnRanks) else f"{DECLARATION}=true"
    cure = tr("see slurm/README.md, then add {line}", line=line)
    if isinstance(work, Once) and _source(work) is None:
        cure = tr("a command cannot say it: put it in a shell script")
    if not handles:
        raise UserError(
            tr(
                "requeue=True, but {name} does not say that it stops with a checkpoint and status {status} "
                "at SIGUSR1, so a time limit would lose its work: {cure}",
                name=name_of(what),
                status=EXIT_STOPPED,
                cure=cure,
            )
        )


def _source(work: Work) -> Path | None:
    """Return the file of a program; None for a command."""
    if isinstance(work, Once):
        return Path(work.command[1]) if work.command[0] == "bash" and len(work.command) == 2 else None
    if work.program[0] != "-m":
        return Path(work.program[0])
    found = importlib.util.find_spec(work.program[1])
    if found is not None and found.submodule_search_locations is not None:  # a package runs its __main__
        found = importlib.util.find_spec(f"{work.program[1]}.__main__")
    return Path(found.origin) if found is not None and found.origin and Path(found.origin).is_file() else None


def combinations(sweep: Sweep | None) -> list[dict[str, Any]]:
    """Return the settings of each element of a sweep; for None, one empty dict.

    >>> combinations({"lr": [0.1, 0.2], "seed": [0]})
    [{'lr': 0.1, 'seed': 0}, {'lr': 0.2, 'seed': 0}]

    Raises:
        UserError: the sweep is empty, or a name has no list of values.
    """
    if sweep is None:
        return [{}]
    if isinstance(sweep, Mapping):
        lone = [
            name
            for name, values in sweep.items()
            if isinstance(values, (str, bytes)) or not isinstance(values, Sequence)
        ]
        if lone:
            raise UserError(
                tr('the sweep over "{name}" needs a list of values: write {name}=[...]', name=lone[0])
            )
        elements = [dict(zip(sweep, values)) for values in itertools.product(*sweep.values())]
    else:
        elements = [dict(element) for element in sweep]
    if not elements or not any(elements):
        raise UserError(tr("the sweep is empty: give it at least one setting with one value"))
    return elements


def options(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return settings as command-line options; True gives the option alone, False and None give nothing.

    >>> options({"lr": 0.1, "weight_decay": 0, "resume": True, "checkpointing": False})
    ('--lr', '0.1', '--weight-decay', '0', '--resume')
    """
    words: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False and value is not None:
            words += [flag, str(value)]
    return tuple(words)


def arguments(given: Sequence[object] | Mapping[str, Any]) -> tuple[str, ...]:
    """Return a program's arguments, from a sequence of words or from settings."""
    return options(given) if isinstance(given, Mapping) else tuple(map(str, given))


def name_of(what: str | Path | Sequence[str] | Callable[..., Any]) -> str:
    """Return a short name for a job: that of its file, module, function or program."""
    if callable(what):
        text = getattr(what, "__name__", type(what).__name__)
    elif isinstance(what, (str, Path)):
        text = (
            Path(what).stem
            if Path(str(what)).suffix in (".py", ".sh", ".bash", ".sbatch")
            else str(what).rpartition(".")[2]
        )
    else:
        text = Path(str(what[0])).name if what else ""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text) or "job"
