"""The student's copy of the labs. Notebooks belong to the student, all other files belong to the course.

The folder is ``$DLO_WORK`` or ``~/dlo-labs``. A released notebook is copied there once. A newer release
replaces the copy only if the student has not changed it. The other files (checks, figures) are always
updated. Other users of the machine cannot read the folder (mode 0700)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import OTHERS, close, own_folder, state_dir, write_aside, write_text
from dlo_lib.grading.lab.course import GLOSSARY, LabInfo, course_root, find_lab, labs


@dataclass(frozen=True)
class Update:
    """The result of an update of one lab: ``kept`` names the student's notebooks for which there is a newer
    release.
    """

    folder: Path
    kept: tuple[str, ...]


def work_dir() -> Path:
    """Return the folder of the student's copies."""
    return Path(os.environ.get("DLO_WORK") or Path.home() / "dlo-labs").expanduser()


def update_workspace() -> list[Update]:
    """Update every lab in the student's folder; the student's work is never changed.

    Raises:
        UserError: the folder cannot be created.
    """
    folder = own_folder(work_dir(), "DLO_WORK", ours=not os.environ.get("DLO_WORK"))
    if folder.stat().st_mode & OTHERS:  # the user made it, and perhaps shares it: the labs in it are closed
        close(*(folder / lab.directory for lab in labs()))
    if (glossary := course_root() / "labs" / GLOSSARY).is_file():
        with write_aside(work_dir() / GLOSSARY) as aside:
            shutil.copyfile(glossary, aside)
    return [update_lab(lab) for lab in labs()]


def update_lab(lab: LabInfo) -> Update:
    """Update one lab in the student's folder."""
    released = course_root() / "labs" / lab.directory
    own = own_folder(work_dir() / lab.directory, "DLO_WORK")
    record = _Record(lab.directory)
    kept = []
    for source in sorted(
        path for path in released.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ):
        target = own / source.relative_to(released)
        if source.suffix == ".ipynb" and target.exists() and _digest(target) != record.copied(target.name):
            if _digest(source) != record.copied(target.name):
                kept.append(target.name)
            continue
        if not target.exists() or _digest(target) != _digest(source):
            with write_aside(target) as aside:
                shutil.copyfile(source, aside)
        if source.suffix == ".ipynb":
            record.note(target.name, _digest(source))
    record.save()
    return Update(own, tuple(kept))


def own_notebook(name: str) -> Path:
    """Find the student's notebook of a lab: in the working directory, in its folder of the lab, or in the
    workspace.

    nbgrader fetches a lab into a folder of the working directory.

    Raises:
        UserError: the lab does not exist, or there is no copy yet.
    """
    lab = find_lab(name)
    for folder in (Path.cwd(), Path.cwd() / lab.directory, work_dir() / lab.directory):
        notebook = folder / f"{lab.name}.ipynb"
        if notebook.is_file():
            return notebook
    raise UserError(f"you have no copy of {lab.directory} yet: `dlo lab` creates one in {work_dir()}")


def fresh_copy(name: str) -> tuple[Path, Path]:
    """Put the notebook of a lab as it is released in place of the student's, which stays beside it under
    another name. Return the notebook, and the earlier one.

    Raises:
        UserError: the lab does not exist, or there is no copy yet.
    """
    lab, notebook = find_lab(name), own_notebook(name)
    released = course_root() / "labs" / lab.directory / notebook.name
    stamp = f"{datetime.now():%Y-%m-%d_%H%M%S}"
    names = (f"{notebook.stem}_{stamp}{more}.ipynb" for more in chain([""], map("_{}".format, count(2))))
    kept = next(path for path in map(notebook.with_name, names) if not path.exists())
    for source, target in ((notebook, kept), (released, notebook)):  # a full disk ends the first
        with write_aside(target) as aside:
            shutil.copyfile(source, aside)
    record = _Record(lab.directory)
    record.note(notebook.name, _digest(released))
    record.save()
    return notebook, kept


class _Record:
    """The release from which each of the student's notebooks was copied."""

    def __init__(self, directory: str) -> None:
        self.file = state_dir() / "copied" / f"{directory}.json"
        try:
            self.digests = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):
            self.digests = {}  # every notebook that differs from the release then counts as changed

    def copied(self, notebook: str) -> str | None:
        return self.digests.get(notebook)

    def note(self, notebook: str, digest: str) -> None:
        self.digests[notebook] = digest

    def save(self) -> None:
        write_text(self.file, json.dumps(self.digests, indent=1, sort_keys=True))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
