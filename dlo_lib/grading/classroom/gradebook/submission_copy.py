"""A copy of a submission that nbgrader's converter can read safely: regular files only, within limits.

nbgrader copies all files beside a notebook to the graded notebook and to the feedback. A symbolic link would
publish a file of the instructor, a named pipe would block, and large files would fill the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from dlo_lib.base.temporary_folders import locked_folder
from dlo_lib.grading.lab.times import FORMAT, utc_time

MOST_FILES, MOST_BYTES = 200, 64 << 20  # beside the notebook
LONGEST_NAME = 200  # bytes, with its folders; the whole path may have 4096
TIMESTAMP = "timestamp.txt"
FOLDER = "dlo-stage-"  # prefix of the folder among the temporary files


@contextlib.contextmanager
def staged_copy(student: str, notebook: Path, rebuilt: Path) -> Iterator[Path]:
    """Yield a folder with ``<student>/<lab>/``: ``rebuilt`` under the name of ``notebook``, and the other
    files.
    """
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
    """Copy the files beside ``notebook`` that are safe and within the limits."""
    source, left, files = notebook.parent, MOST_BYTES, 0
    for path in sorted(_files_below(source)):
        name = path.relative_to(source)
        with contextlib.suppress(OSError):  # unreadable, and not needed
            kind = path.lstat()
            if (
                path.suffix == ".ipynb"
                or not stat.S_ISREG(kind.st_mode)
                or kind.st_size > left
                or len(os.fsencode(name)) > LONGEST_NAME
            ):
                continue
            if name.parts[0] in (TIMESTAMP, notebook.name):
                if name == Path(TIMESTAMP):
                    _copy_time(path, target / name)
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name, follow_symlinks=False)
            left -= kind.st_size
            files += 1
        if files == MOST_FILES:
            return


def _files_below(folder: Path) -> Iterator[Path]:
    return (Path(inner) / file for inner, _, files in os.walk(folder) for file in files)


def _copy_time(file: Path, target: Path) -> None:
    """Write the time in UTC, as nbgrader reads it rightly; leave out what is no time, at which it would
    stop.
    """
    with contextlib.suppress(ValueError, OSError):
        if file.stat().st_size < 200:
            target.write_text(utc_time(file.read_text(encoding="utf-8")).strftime(FORMAT), encoding="utf-8")
