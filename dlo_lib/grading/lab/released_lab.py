"""A lab as a student's installation has it: the released notebook read as a source, without solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlo_lib.grading.lab.course import read_lab_info
from dlo_lib.grading.lab.source import Cell, LabSource, kind_of


def released_lab(folder: Path) -> LabSource:
    """The lab in ``labs/NN_name``. Its cells are as students got them; no solution differs from its release.

    Raises:
        UserError: there is no ``lab.toml``.
    """
    info = read_lab_info(folder)
    cells = json.loads((folder / info.notebook).read_text(encoding="utf-8"))["cells"]
    return LabSource(info, folder, folder, tuple(map(_cell, cells)))


def _cell(cell: dict[str, Any]) -> Cell:
    grading = cell["metadata"].get("nbgrader", {})
    text = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    return Cell(
        grading.get("grade_id") or cell["id"], kind_of(cell), text, text, float(grading.get("points") or 0)
    )
