"""Compiled files of the library and of a lab, which exist before a process of the sandbox imports them.

A process that compiles what it imports frees many small objects, and the objects of its workers fall into the
holes: each touches another inherited page, which is copied. In a new checkout a rank held up to 3 MiB more
for this reason, more than checks of memory allow. A process that reads compiled files has no such holes. The
zygote itself cannot write them, because its sandbox shows the library read-only.
"""

from __future__ import annotations

import compileall
import functools
import os
import py_compile
from collections.abc import Iterable
from pathlib import Path

import dlo_lib

LIBRARY = Path(dlo_lib.__file__).parent


@functools.cache
def compile_library(folder: Path = LIBRARY) -> None:
    """Write the compiled files of ``folder`` that are missing or older than their source, also where
    ``PYTHONDONTWRITEBYTECODE`` is set. A folder that cannot be written stays as it is: installers compile.

    Cost: 0.01 s of CPU time if all are there, otherwise some seconds, once.
    """
    if os.access(folder, os.W_OK):
        compileall.compile_dir(folder, quiet=2)


def compile_modules(folder: Path, names: Iterable[str]) -> None:
    """Write the compiled files of those modules that are files of ``folder``, whose copies workers import.

    A worker reads its copy without a look at the time of its source, which is that of the copy. So no worker
    spends the 3 ms that a module of 200 lines takes to compile.
    """
    for name in names:
        file = folder / f"{name}.py"
        if file.is_file():
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(file), invalidation_mode=mode, quiet=2)
