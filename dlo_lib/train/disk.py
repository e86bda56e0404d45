"""What a disk refuses, as one line with the cure, whoever was writing: Python or safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dlo_lib.errors import UserError, no_space


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system in the body into a ``UserError`` that names ``path``; let all others through."""
    try:
        yield
    except OSError as error:
        raise _cure(path, error) from error
    except SafetensorError as error:  # written in Rust, which gives the system's error in its text only
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise _cure(path, OSError(int(number[1]), os.strerror(int(number[1])))) from error


def _cure(path: Path, error: OSError) -> UserError:
    return no_space(path, error) or UserError(f"cannot write {path} ({error.strerror or error}): choose another --out")
