"""What was handed in, as nbgrader's converter may safely walk over it: a copy with regular files only, within limits.

nbgrader copies whatever lies beside a notebook on to the graded notebook and from there to the feedback. A symbolic link would bring a file
of the instructor's along, a named pipe would wait for ever, a full disk of files would fill another one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from nbgrader.utils import parse_utc

from dlo_lib.grading.stale import locked_folder

MOST_FILES, MOST_BYTES = 200, 64 << 20  # beside the notebook
LONGEST_NAME = 200  # bytes, with its folders: a path may have 4096 where it is copied to
TIMESTAMP = "timestamp.txt"
FOLDER = "dlo-stage-"  # how its name begins, among temporary files


@contextlib.contextmanager
def staged(student: str, notebook: Path, rebuilt: Path) -> Iterator[Path]:
    """A folder that holds ``<student>/<lab>/``: ``rebuilt`` under the name of ``notebook``, and what else lay beside that."""
    folder, lock = locked_folder(FOLDER)
    try:
        target = folder / student / notebook.parent.name
        target.mkdir(parents=True)
        _copy_files(notebook, target)
        shutil.copyfile(rebuilt, target / notebook.name)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _copy_files(notebook: Path, target: Path) -> None:
    """What lies beside ``notebook``, as far as nothing stumbles over it."""
    source, left, files = notebook.parent, MOST_BYTES, 0
    for path in sorted(_files_below(source)):
        name = path.relative_to(source)
        with contextlib.suppress(OSError):  # unreadable: it is not the notebook, and nothing depends on it
            kind = path.lstat()
            if path.suffix == ".ipynb" or not stat.S_ISREG(kind.st_mode) or kind.st_size > left or len(os.fsencode(name)) > LONGEST_NAME:
                continue
            if name.parts[0] in (TIMESTAMP, notebook.name) and not (name == Path(TIMESTAMP) and _is_time(path)):
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name, follow_symlinks=False)
            left -= kind.st_size
            files += 1
        if files == MOST_FILES:
            return


def _files_below(folder: Path) -> Iterator[Path]:
    return (Path(inner) / file for inner, _, files in os.walk(folder) for file in files)


def _is_time(file: Path) -> bool:
    """Whether nbgrader can read it; it would stop at another."""
    try:
        return file.stat().st_size < 200 and parse_utc(file.read_text(encoding="utf-8").strip()) is not None
    except Exception:  # noqa: BLE001  the parser raises whatever comes to it
        return False
