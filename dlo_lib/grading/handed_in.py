"""What was handed in, as nbgrader's converter may safely walk over it: a copy with regular files only, within limits.

nbgrader copies whatever lies beside a notebook on to the graded notebook and from there to the feedback. A symbolic link would bring a file
of the instructor's along, a named pipe would wait for ever, a full disk of files would fill another one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbgrader.utils import parse_utc

MOST_FILES, MOST_BYTES = 200, 64 << 20  # beside the notebook
TIMESTAMP = "timestamp.txt"


@contextlib.contextmanager
def staged(student: str, notebook: Path, rebuilt: Path) -> Iterator[Path]:
    """A folder that holds ``<student>/<lab>/``: ``rebuilt`` under the name of ``notebook``, and what else lay beside that."""
    with tempfile.TemporaryDirectory(prefix="dlo-stage-") as name:
        target = Path(name) / student / notebook.parent.name
        target.mkdir(parents=True)
        _copy_files(notebook.parent, target)
        shutil.copyfile(rebuilt, target / notebook.name)
        yield Path(name)


def _copy_files(source: Path, target: Path) -> None:
    number = size = 0
    for folder, names, files in os.walk(source):
        names.sort()
        for file in sorted(files):
            path = Path(folder) / file
            kind = path.lstat()
            size += kind.st_size
            if path.suffix == ".ipynb" or not stat.S_ISREG(kind.st_mode) or size > MOST_BYTES:
                continue
            if path.relative_to(source) == Path(TIMESTAMP) and not _is_time(path):
                continue
            number += 1
            if number > MOST_FILES:
                return
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # unreadable: it is not the notebook, and nothing depends on it
                shutil.copyfile(path, place, follow_symlinks=False)


def _is_time(file: Path) -> bool:
    """Whether nbgrader can read it; it would stop at another."""
    try:
        return file.stat().st_size < 200 and parse_utc(file.read_text(encoding="utf-8").strip()) is not None
    except Exception:  # noqa: BLE001  the parser raises whatever comes to it
        return False
