"""Compiled files of the library, which a zygote needs before it imports the library.

A process that compiles what it imports frees many small objects, and the objects of its workers fall into the
holes: each touches another inherited page, which is copied. In a new checkout a rank held up to 3 MiB more
for this reason, more than checks of memory allow. A process that reads compiled files has no such holes. The
zygote itself cannot write them, because its sandbox shows the library read-only.
"""

from __future__ import annotations

import compileall
import functools
import os
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
