"""What a person can put right: an error that is one line with its cure, and the exit status that goes with it."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

EXIT_BAD_INPUT = 2


class UserError(Exception):
    """Bad input. The message is one line that names what is wrong and the cure; commands print it and exit with 2."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest existing names offered.

    >>> str(unknown_name("model", "lama-3.2-3b", ["llama-3.2-3b", "tiny"]))
    'unknown model "lama-3.2-3b": did you mean llama-3.2-3b? Known: llama-3.2-3b, tiny'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UserError(f'unknown {kind} "{name}": {hint}Known: {", ".join(names) or "none"}')


def no_space(path: object, error: OSError) -> UserError | None:
    """The error for a full disk or quota, or None when ``error`` is another one."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return UserError(f"no space left to write {path}: free some space or choose another folder; nothing was changed")
