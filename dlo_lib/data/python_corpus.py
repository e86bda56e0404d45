"""A corpus that needs no network: the bytes of the sources of Python's standard library.

A document is a ``*.py`` file of the standard library of the running Python, without its tests and without
installed packages. The files are taken in the order of their paths, up to ``MAX_BYTES``. They are written
once to one array of tokens in the cache, which is then memory-mapped. Another version of Python gives another
corpus, so its losses compare runs on one machine, not runs on different machines. The sources are under the
licence of the Python Software Foundation. They are read from the installed Python; this project contains no
part of them."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import cache_dir, write_aside
from dlo_lib.data.documents import FlatDocuments
from dlo_lib.data.tokens import END_OF_TEXT, encode

MAX_BYTES = 16 * 2**20
"""The maximal size of the corpus. With 2 bytes per token, it takes at most 32 MiB in the cache."""

_DTYPE = np.dtype("<u2")
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_corpus() -> FlatDocuments:
    """Open the corpus; create it on first use.

    Several processes can create it at the same time: each writes a temporary file and renames it, so every
    process reads a complete file with the same bytes.

    Raises:
        UserError: there are no sources, there is no space left, or the file in the cache is damaged.
    """
    path = corpus_file()
    if not path.exists():
        _make(path)
    if path.stat().st_size % _DTYPE.itemsize or not path.stat().st_size:
        raise _damaged(path)
    tokens = np.memmap(path, dtype=_DTYPE, mode="r")
    if tokens[-1] != END_OF_TEXT:
        raise _damaged(path)
    return FlatDocuments(tokens)


def corpus_file() -> Path:
    """Return the path of the corpus in the cache; its name contains the version of Python."""
    return (
        cache_dir()
        / "corpora"
        / f"python-{platform.python_implementation().lower()}-{platform.python_version()}.u16"
    )


def source_files() -> list[Path]:
    """Return the sources of the standard library, sorted by path.

    Raises:
        UserError: the running Python has no sources (its library is a zip file or only byte code).
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        # Debian's sitecustomize.py is a link to a file that may be missing.
        found += [path for name in files if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    if not found:
        raise UserError(f'no Python sources below {library}: use a full Python, or data="arithmetic"')
    return sorted(found)


def _make(path: Path) -> None:
    taken, texts = 0, []
    for file in source_files():
        text = file.read_bytes()
        taken += len(text)
        if taken > MAX_BYTES:
            break
        if text:
            texts += [encode(text), np.array([END_OF_TEXT])]
    with write_aside(path) as aside:
        aside.write_bytes(np.concatenate(texts).astype(_DTYPE).tobytes())


def _damaged(path: Path) -> UserError:
    return UserError(f"the corpus {path} is damaged: remove it; the next use creates it again")
