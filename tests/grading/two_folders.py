"""Where a file of a lab is: what students get in ``labs/NN_name``, the rest in ``solutions/NN_name``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlo_lib.grading.lab.release import home_of


def place_of(source: Path, name: str) -> Path:
    """The path of the file ``name`` of the lab with this ``source`` folder; its folder is created."""
    path = home_of(source, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_lab(root: Path, directory: str, files: Mapping[str, str]) -> Path:
    """Write the files of a lab below ``root``, which is a course; return its source folder."""
    source = root / "solutions" / directory
    source.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        place_of(source, name).write_text(text, encoding="utf-8")
    return source
