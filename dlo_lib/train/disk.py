"""Errors of the file system as one line with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlo_lib.base.errors import UserError, no_space


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the file system in the body to a ``UserError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise no_space(path, error) or UserError(
            f"cannot write {path} ({error.strerror or error}): choose another --out"
        ) from error
