"""Find, read and parse the notebook of a submission. This module executes nothing, and no file can stop it.

The notebook is the file with the lab's name, or otherwise another file with the lab's id: one that a browser
has renamed, packed into a folder or saved as text.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.judge.cells import Submission, as_dict, rebuild_submission, replace_surrogates
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.sandbox.limits import limit_growth

MAX_BYTES = 100 << 20
MAX_MEMORY = 1536 << 20  # bytes to parse a file: text of ``MAX_BYTES`` needs up to 9 times its size
MAX_FILES = 50  # to search for a renamed notebook
SAVED_AS = (".ipynb", ".ipynb.txt", ".ipynb.json", ".json")


class Invalid(Exception):
    """The submission cannot be graded; the text gives the student the reason."""


def find_submission(path: Path, lab: str) -> tuple[Path, list[str]]:
    """Return the notebook at ``path``, or otherwise another one with the id of ``lab``, and warnings.

    Raises:
        Invalid: there is none.
    """
    found, _, warnings = read_submission(path, lab)
    return found, warnings


def read_submission(path: Path, lab: str) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the same as :func:`find_submission`, with the parsed notebook: a large one takes seconds.

    Raises:
        Invalid: there is none.
    """
    # A link in place of the lab's or the student's folder may lead to another student's.
    if any(folder.is_symlink() for folder in (path.parent, path.parent.parent)):
        raise Invalid("symlink")
    reason: Invalid | None = None
    if path.exists() or path.is_symlink():
        try:
            return path, read_notebook(path), []
        except Invalid as error:
            reason = error
    for other in notebooks_beside(path):
        try:
            if _lab_of(notebook := read_notebook(other)) == lab:
                return other, notebook, [_taken_for(other, path)]
        except Invalid:
            continue
    raise reason or Invalid(tr("there is no notebook {name} in the submission", name=path.name))


def notebooks_beside(path: Path) -> list[Path]:
    """Return other files that may be the notebook ``path``: renamed, in a subfolder, or saved as text by a
    browser or a mail program.

    At most the first ``MAX_FILES``, and at most 100 MB of them.
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
    """Return the submission with the notebook expected at ``path``, and warnings about where it was found.

    If the notebook at ``path`` is unchanged since the release and a copy beside it is not, the copy is used.

    Raises:
        Invalid: there is no readable notebook.
    """
    _, notebook, warnings = read_submission(path, lab.info.directory)
    submission = rebuild_submission(notebook, lab)
    if submission.attempted:
        return submission, warnings
    for other in notebooks_beside(path):
        try:
            notebook = read_notebook(other)
        except Invalid:
            continue
        if _lab_of(notebook) == lab.info.directory and (copy := rebuild_submission(notebook, lab)).attempted:
            return copy, [_taken_for(other, path)]
    return submission, warnings


def read_notebook(path: Path) -> dict[str, Any]:
    """Return the parsed notebook; only its outline is checked.

    Raises:
        Invalid: the file is not a readable notebook.
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
        raise Invalid(tr("larger than 100 MB: clear the outputs and submit it again"))
    if not raw.strip():
        raise Invalid(tr("the file is empty: save the notebook and submit it again"))
    try:
        with limit_growth(MAX_MEMORY):
            # UTF-8, or UTF-16 and UTF-32 as some editors write
            notebook = json.loads(raw.decode(json.detect_encoding(raw)))
    except MemoryError:
        text = tr("takes far more memory than a notebook does: clear the outputs and submit it again")
        raise Invalid(text) from None
    except RecursionError:
        raise Invalid(tr("nested too deep to be a notebook")) from None
    except UnicodeDecodeError:
        text = tr("not a text file in UTF-8: save the notebook in Jupyter and submit it again")
        raise Invalid(text) from None
    except ValueError:
        text = tr("damaged: not valid JSON; open it in Jupyter, save it and submit it again")
        raise Invalid(text) from None
    if type(notebook) is dict and "worksheets" in notebook:
        raise Invalid(tr("notebook format 3: open it in Jupyter, save it and submit it again"))
    if type(notebook) is not dict or type(notebook.get("cells")) is not list:
        raise Invalid(tr("not a notebook: it has no cells"))
    return notebook


def _lab_of(notebook: Mapping[str, Any]) -> object:
    """Return the id of the lab to which the notebook belongs."""
    return as_dict(as_dict(notebook.get("metadata")).get("dlo")).get("lab")


def _taken_for(found: Path, path: Path) -> str:
    # The student chose the name, and a page or a terminal may show it.
    name = re.sub(r"[^\w .,()+=-]", "?", replace_surrogates(found.name))[:80]
    return tr("{name} was taken for {expected}: keep the notebook's name", name=name, expected=path.name)
