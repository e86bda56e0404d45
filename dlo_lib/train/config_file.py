"""Options of a training run from a TOML file, as ``dlo plan`` writes it: ``--config FILE``.

The keys are the names of ``TrainConfig``. The options of the command line take precedence, because they come
after those of the file.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.train.config import TrainConfig

OPTION = "--config"


def with_file(arguments: list[str]) -> list[str]:
    """Return the arguments with ``--config FILE`` replaced by the options of the file.

    Raises:
        UserError: the file cannot be read, has an unknown key, or a value that no option has.
    """
    kept, files, words = list[str](), list[str](), iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != OPTION:
            kept.append(word)
        elif (file := value if equals else next(words, "")) == "":
            raise UserError(f"{OPTION} names no file: {OPTION} plan.toml")
        else:
            files.append(file)
    return [word for file in files for word in _options(Path(file).expanduser())] + kept


def _options(file: Path) -> list[str]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{file} is not a readable TOML file: {error}") from error
    known = [option.name for option in fields(TrainConfig)]
    words: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UserError(f"{file}: {unknown_name('option', key, known)}")
        if isinstance(value, (dict, list)) or not isinstance(value, (str, int, float)):
            raise UserError(f"{file}: {key} is {value!r}: give a text, a number, true or false")
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not False:
            words.append(f"{flag}={value}")
    return words
