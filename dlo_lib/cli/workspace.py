"""The student's own copy of the labs: notebooks belong to the student, everything beside them to the course.

The folder is ``$DLO_WORK``, else ``~/dlo-labs``. A released notebook is copied there once. When the course brings a newer one, it replaces
the copy only if the student never changed it; what lies beside it (checks, figures) is always brought up to date.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.errors import UserError
from dlo_lib.files import state_dir, write_aside, write_text
from dlo_lib.grading.course import LabInfo, course_root, find_lab, labs


@dataclass(frozen=True)
class Update:
    """What bringing one lab up to date found: ``kept`` names notebooks of the student's that a newer release exists for."""

    folder: Path
    kept: tuple[str, ...]


def work_dir() -> Path:
    """Where the student's own copies are."""
    return Path(os.environ.get("DLO_WORK") or Path.home() / "dlo-labs").expanduser()


def update_workspace() -> list[Update]:
    """Bring every lab of the course to the student's folder; the student's work is never touched."""
    return [update_lab(lab) for lab in labs()]


def update_lab(lab: LabInfo) -> Update:
    """Bring one lab to the student's folder."""
    released = course_root() / "labs" / lab.directory
    own = work_dir() / lab.directory
    record = _Record(lab.directory)
    kept = []
    for source in sorted(path for path in released.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
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
    """The student's notebook of that lab: here, one folder down (where nbgrader fetches it), or in the workspace.

    Raises:
        UserError: no such lab, or no copy of it yet.
    """
    lab = find_lab(name)
    for folder in (Path.cwd(), Path.cwd() / lab.directory, work_dir() / lab.directory):
        notebook = folder / f"{lab.name}.ipynb"
        if notebook.is_file():
            return notebook
    raise UserError(f"you have no copy of {lab.directory} yet: `dlo lab` makes one in {work_dir()}")


class _Record:
    """Which release each of the student's notebooks was copied from."""

    def __init__(self, directory: str) -> None:
        self.file = state_dir() / "copied" / f"{directory}.json"
        try:
            self.digests = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):
            self.digests = {}  # then every notebook that differs from the release counts as the student's own

    def copied(self, notebook: str) -> str | None:
        return self.digests.get(notebook)

    def note(self, notebook: str, digest: str) -> None:
        self.digests[notebook] = digest

    def save(self) -> None:
        write_text(self.file, json.dumps(self.digests, indent=1, sort_keys=True))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
