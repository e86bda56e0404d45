"""From whatever was handed in to the notebook that is judged: found, read and taken apart. Nothing of it is executed here, and no file can
stop it.

The file is the one by the lab's name; where that is none, another that carries the lab's id: renamed by a browser, packed into a folder,
saved as text.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_lib.grading.cells import Submission, as_dict, take, whole
from dlo_lib.grading.limits import at_most_further
from dlo_lib.grading.source import LabSource
from dlo_lib.text import tr

MAX_BYTES = 100 << 20
MAX_MEMORY = 1536 << 20  # to take a file apart: one of that size that is all text needs up to 9 bytes for each of its own
MAX_FILES = 50  # that are looked at for a renamed notebook
SAVED_AS = (".ipynb", ".ipynb.txt", ".ipynb.json", ".json")


class Invalid(Exception):
    """It cannot be graded; the text tells the student why."""


def find_submission(path: Path, lab: str) -> tuple[Path, list[str]]:
    """The notebook at ``path``, or where that is none another that carries the id of ``lab``; with warnings.

    Raises:
        Invalid: there is none.
    """
    if any(folder.is_symlink() for folder in (path.parent, path.parent.parent)):  # the lab's and the student's: a classmate's, it may be
        raise Invalid("symlink")
    reason: Invalid | None = None
    if path.exists() or path.is_symlink():
        try:
            read_notebook(path)
            return path, []
        except Invalid as error:
            reason = error
    for other in notebooks_beside(path):
        try:
            if _lab_of(read_notebook(other)) == lab:
                return other, [_taken_for(other, path)]
        except Invalid:
            continue
    raise reason or Invalid(tr("there is no notebook {name} in what was handed in", name=path.name))


def notebooks_beside(path: Path) -> list[Path]:
    """Other files that may be the notebook ``path``: renamed, in a folder of its own, or saved as text by a browser or mail program.

    The first fifty, and no more than 100 MB of them.
    """
    found: list[Path] = []
    for folder, names, files in os.walk(path.parent):
        names[:] = sorted(name for name in names if not name.startswith("."))[:MAX_FILES]
        found += [Path(folder) / file for file in files if file.lower().endswith(SAVED_AS)]
        if len(found) > 100 * MAX_FILES:
            break
    found.sort(key=lambda file: (len(file.parts), file.suffix != ".ipynb", os.fsencode(file)))
    others, left = [], MAX_BYTES
    for file in found:
        if file != path and (size := file.lstat().st_size) <= left:
            others.append(file)
            left -= size
    return others[:MAX_FILES]


def open_notebook(path: Path, lab: LabSource) -> tuple[Submission, list[str]]:
    """The submission whose notebook should be ``path``, with warnings of how it was found.

    Where ``path`` is as it was released and a copy beside it has been worked in, that is the submission.

    Raises:
        Invalid: there is none that can be read.
    """
    found, warnings = find_submission(path, lab.info.directory)
    submission = take(read_notebook(found), lab)
    if submission.attempted:
        return submission, warnings
    for other in notebooks_beside(path):
        try:
            notebook = read_notebook(other)
        except Invalid:
            continue
        if _lab_of(notebook) == lab.info.directory and (copy := take(notebook, lab)).attempted:
            return copy, [_taken_for(other, path)]
    return submission, warnings


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook as it was parsed; only its outline has been looked at.

    Raises:
        Invalid: it is no notebook that can be read.
    """
    if path.is_symlink():
        raise Invalid("symlink")
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Invalid(tr("not a regular file"))
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Invalid(tr("not a regular file"))
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Invalid(tr("the file cannot be read: {reason}", reason=error.strerror)) from error
    if len(raw) > MAX_BYTES:
        raise Invalid(tr("larger than 100 MB: clear the outputs and hand it in again"))
    if not raw.strip():
        raise Invalid(tr("the file is empty: save the notebook and hand it in again"))
    try:
        with at_most_further(MAX_MEMORY):
            notebook = json.loads(raw.decode(json.detect_encoding(raw)))  # UTF-8, or UTF-16 and UTF-32 as some editors save it
    except MemoryError:
        raise Invalid(tr("takes far more memory than a notebook does: clear the outputs and hand it in again")) from None
    except RecursionError:
        raise Invalid(tr("nested too deep to be a notebook")) from None
    except UnicodeDecodeError:
        raise Invalid(tr("not a text file in UTF-8: save the notebook in Jupyter and hand it in again")) from None
    except ValueError:
        raise Invalid(tr("damaged: not valid JSON; open it in Jupyter, save it and hand it in again")) from None
    if type(notebook) is dict and "worksheets" in notebook:
        raise Invalid(tr("notebook format 3: open it in Jupyter, save it and hand it in again"))
    if type(notebook) is not dict or type(notebook.get("cells")) is not list:
        raise Invalid(tr("not a notebook: it has no cells"))
    return notebook


def _lab_of(notebook: Mapping[str, Any]) -> object:
    """The id of the lab that the notebook was made for."""
    return as_dict(as_dict(notebook.get("metadata")).get("dlo")).get("lab")


def _taken_for(found: Path, path: Path) -> str:
    # A page or a terminal may show the name one day, and the student chose it.
    name = re.sub(r"[^\w .,()+=-]", "?", whole(found.name))[:80]
    return tr("{name} was taken for {expected}: keep the notebook's name", name=name, expected=path.name)
