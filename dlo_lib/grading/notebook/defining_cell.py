"""The cell of a notebook that defines a name. This module does not import torch, because each kernel loads
it when it starts (``fresh_kernel``).
"""

from __future__ import annotations

import json
import re
import symtable
from pathlib import Path

from dlo_lib.base.text import tr

_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


def where_defined(notebook: Path, name: str) -> str:
    """Return a sentence that says which cell of ``notebook`` defines ``name``; "" if none does, or if the
    file cannot be read.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return ""
    section = ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            section = (_HEADING.findall(source) or [section])[-1]
        elif cell["cell_type"] == "code" and name in _defined(source):
            return tr(
                "`{name}` is defined in another cell, which has not run since the kernel started. That cell "
                'begins with `{begin}`, below the heading "{section}". Run it, and then this one. (The menu '
                "*Run* has *Run All Above Selected Cell*.)",
                name=name, begin=_first_line(source), section=section,
            )  # fmt: skip
    return ""


def _defined(source: str) -> set[str]:
    """The names that a cell defines at its top level; none for a cell that is not plain Python."""
    try:
        symbols = symtable.symtable(source, "<cell>", "exec").get_symbols()
    except SyntaxError:
        return set()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _first_line(source: str) -> str:
    """The first line of code of a cell; a comment if it has nothing else."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("#")), lines[0])
