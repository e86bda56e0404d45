"""The students' archive: the labs as released, the library, and what installs them. The same
course gives the same bytes.

It is built from an allow-list, never from what happens to lie around: labs file by file as
:mod:`dlo_lib.grading.lab.release` writes them, the library and scripts by the suffixes they are made of.
Solutions, hidden checks, mutants and tests are not on it. Times, owners, modes and the order of files are
fixed.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_aside
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.course import (
    GLOSSARY,
    QUIZ_ANSWERS_FILE,
    REFERENCES_FILE,
    course_root,
    source_labs,
)
from dlo_lib.grading.lab.release import LEFT_BY_TOOLS, check_course_in_step, released_files

NAME = "dlo-kit"
FILES = (
    "Makefile", "README.md", "LICENSE", "CITATION.cff", "pyproject.toml", "constraints.txt",
    "environment.yml", "deploy/Dockerfile", "deploy/Dockerfile.dockerignore",
    ".devcontainer/devcontainer.json",
)  # fmt: skip
ANSWERS_FILES = (REFERENCES_FILE, QUIZ_ANSWERS_FILE)
"""What a person without a class has, and a class may not get."""
FOLDERS = ("dlo_lib", "deploy", "datasets", "docs", "slurm")
SUFFIXES = {
    ".py",
    ".toml",
    ".j2",
    ".html",
    ".css",
    ".po",
    ".typed",
    ".md",
    ".txt",
    ".sbatch",
    ".sh",
    ".png",
    ".svg",
    ".json",
    ".service",
    ".conf",
}


def kit_files(with_answers: bool = True) -> dict[str, bytes]:
    """All files of the archive: path below its one folder → content.

    Args:
        with_answers: whether it holds the references and the answers of the quiz, see ``ANSWERS_FILES``.

    Raises:
        UserError: the course has no solutions, which say what may be released; ``labs/`` is not up to date; a
            file is missing.
    """
    root = course_root()
    labs = source_labs()
    if not labs:
        raise UserError(
            tr("no solutions in {folder}: a kit is made from an instructor's copy of the course", folder=root)
        )
    if lines := check_course_in_step():
        raise UserError(lines[0])
    files = {
        f"labs/{lab.directory}/{name}": content
        for lab in labs
        for name, content in released_files(lab).items()
        if with_answers or name not in ANSWERS_FILES
    }
    if (glossary := root / "labs" / GLOSSARY).is_file():
        files[f"labs/{GLOSSARY}"] = glossary.read_bytes()
    for name in FILES:
        if not (root / name).is_file():
            raise UserError(tr("no {name} in {folder}: a kit needs it", name=name, folder=root))
        files[name] = (root / name).read_bytes()
    for path in _below(root):
        files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


def write_kit(target: Path, with_answers: bool = True) -> Path:
    """Write the archive, whole or not at all; ``with_answers`` as in :func:`kit_files`.

    Raises:
        UserError: as :func:`kit_files`.
    """
    files = kit_files(with_answers)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(f"{NAME}/{name}")
            info.size, info.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(info, io.BytesIO(content))
    with write_aside(target) as aside:
        aside.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return target


def _below(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            parts = path.relative_to(root).parts
            hidden = any(part.startswith(".") or part in LEFT_BY_TOOLS for part in parts)
            if path.is_file() and not path.is_symlink() and path.suffix in SUFFIXES and not hidden:
                yield path
