"""A real text that needs no network: the sources of Python's standard library, byte by byte.

Every ``*.py`` file of the running Python's library (without its tests and without installed packages), in the order of their paths until
``MAX_BYTES`` are taken, is a document; they are written once to one array of tokens in the cache and memory-mapped from there. Another
version of Python gives another text, so losses on it compare runs on one machine, not machines. The sources are under the licence of the
Python Software Foundation; they are read where they are installed, and no part of them is in this project.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from dlo_lib.data.documents import FlatDocuments
from dlo_lib.data.tokens import END_OF_TEXT, encode
from dlo_lib.errors import UserError
from dlo_lib.files import cache_dir, write_aside

MAX_BYTES = 16 * 2**20
"""The size of the corpus at most: 2 bytes a token, so 32 MiB in the cache."""

_DTYPE = np.dtype("<u2")
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_corpus() -> FlatDocuments:
    """The corpus, made on first use.

    Several ranks or processes may be first at once: each writes aside and renames, so all of them see a whole file, of the same bytes.

    Raises:
        UserError: there are no sources, no space left, or the file in the cache is damaged.
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
    """Where the corpus lies in the cache; its name says which Python it was made from."""
    return cache_dir() / "corpora" / f"python-{platform.python_implementation().lower()}-{platform.python_version()}.u16"


def source_files() -> list[Path]:
    """The sources of the standard library, sorted by path.

    Raises:
        UserError: the running Python has none (its library is in a zip file, or holds byte code only).
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
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
    return UserError(f"the corpus {path} is damaged: remove it, it is made again on the next use")
