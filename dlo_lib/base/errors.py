"""Errors that the user can correct: one line with the cure, and the exit status of a command that fails with
one.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator
from numbers import Integral

EXIT_BAD_INPUT = 2


class UserError(Exception):
    """Bad input.

    The message is one line that names the fault and the cure; commands print it and exit with status 2.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name; its message suggests the nearest known names.

    >>> str(unknown_name("model", "lama-3.2-3b", ["llama-3.2-3b", "tiny"]))
    'unknown model "lama-3.2-3b": did you mean llama-3.2-3b? Known: llama-3.2-3b, tiny'
    """
    names = sorted(known)
    near = nearest(name, names)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UserError(f'unknown {kind} "{name}": {hint}Known: {", ".join(names) or "none"}')


def require_count(name: str, value: object, least: int = 1) -> None:
    """Check that ``value`` is a whole number, at least ``least``; numpy's integers count, True does not.

    Raises:
        UserError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} is {value!r}: it should be a whole number, at least {least}")
    if value < least:
        raise UserError(f"{name} is {value}: use at least {least}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three names of ``known`` that are similar to ``name``."""
    return difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.5)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then what caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def no_space(path: object, error: OSError) -> UserError | None:
    """Return the error for a full disk or quota; None if ``error`` has another cause."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return UserError(
        f"no space left to write {path}: free some space or choose another folder; nothing was changed"
    )
