"""Reports on disk, one file per submission, written atomically, with a key.

The key is a digest of the submitted files, the lab's source, the class secret, the library and the versions
of Python, torch and nbgrader. A report whose key is unchanged is still valid, so a killed batch resumes with
the reports it had written. Cost: reading each file once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dlo_lib
from dlo_lib.base.files import write_text
from dlo_lib.grading.judge.intake import MAX_BYTES, notebooks_beside
from dlo_lib.grading.judge.report import CheckReport, QuestionReport, Report
from dlo_lib.grading.lab.course import BUILT_FILES, given_folder
from dlo_lib.grading.lab.source import LabSource

LEFT_OUT = ("__pycache__", ".ipynb_checkpoints")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._@-]{0,80}")


@dataclass(frozen=True)
class StoredReport:
    """A report with its key.

    Args:
        key: identifies what the report depends on.
        report: the report.
        alone: no other submission was judged at the same time, or none had an influence on it.
        timing: seconds by kind.
    """

    key: str
    report: Report
    alone: bool
    timing: dict[str, float]

    def save(self, file: Path) -> None:
        """Write the report atomically."""
        write_text(file, json.dumps(asdict(self), indent=1))


def load(file: Path) -> StoredReport | None:
    """Return what :meth:`StoredReport.save` wrote, or None if there is no readable report."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return StoredReport(values["key"], report_from(values["report"]), values["alone"], values["timing"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def report_file(folder: Path, student: str) -> Path:
    """Return the file of the report of ``student`` in ``folder``; the name of a student may be an invalid
    path.
    """
    digest = hashlib.sha256(student.encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"{student if PLAIN_NAME.fullmatch(student) else digest[:24]}-{digest[:6]}.json"


def lab_key(lab: LabSource, secret: str, sandbox: str) -> str:
    """Return a digest of everything that a verdict depends on except the submission.

    Files that are built from the lab's text do not count.
    """
    parts = [
        *(_tree(folder, keep=_is_source) for folder in lab.folders),
        _library(),
        secret,
        sandbox,
    ]
    parts += [platform.python_version(), version("torch"), version("nbgrader")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def checks_version(source: Path) -> str:
    """Return a short digest of the lab with this ``source`` folder: its text, checks and settings."""
    trees = [
        _tree(folder, keep=lambda path: _is_source(path) and path.name != "mutants.py")
        for folder in (source, given_folder(source))
    ]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:10]


def submission_key(lab: str, notebook: Path) -> str:
    """Return the key of the submission with the notebook expected at ``notebook``; ``lab`` is
    :func:`lab_key`'s.
    """
    digest = hashlib.sha256(f"{lab}\n{notebook.name}\n".encode("utf-8", "surrogateescape"))
    for path in (notebook, *notebooks_beside(notebook)):
        name = os.fsencode(path.relative_to(notebook.parent))
        digest.update(b"%d %s %s\n" % (len(name), name, _content(path).encode()))
    return digest.hexdigest()


def _is_source(path: Path) -> bool:
    return path.suffix != ".ipynb" and path.name not in BUILT_FILES


@cache
def _library() -> str:
    return _tree(Path(dlo_lib.__file__).parent, keep=lambda path: path.suffix in (".py", ".toml"))


def _tree(folder: Path, keep: Any) -> str:
    files: Iterable[Path] = (
        path
        for path in folder.rglob("*")
        if not set(path.parts) & set(LEFT_OUT) and keep(path) and path.is_file()
    )
    lines = sorted(f"{path.relative_to(folder).as_posix()} {_content(path)}" for path in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _content(path: Path) -> str:
    """Return the digest of a regular file, as far as the judge reads it; of anything else, its kind."""
    digest, left = hashlib.sha256(), MAX_BYTES + 1
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode):
                return f"kind {stat.S_IFMT(kind.st_mode)}"
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
    except OSError as error:
        return f"error {error.errno}"
    return digest.hexdigest()


def report_from(values: dict[str, Any]) -> Report:
    """Return the report of which ``values`` is the ``dataclasses.asdict``.

    Raises:
        KeyError, TypeError: ``values`` are not those of a report.
    """
    questions = {
        name: QuestionReport(
            **{**question, "checks": tuple(CheckReport(**check) for check in question["checks"])}
        )
        for name, question in values["questions"].items()
    }
    return Report(values["lab"], values["status"], questions, tuple(values["warnings"]))
