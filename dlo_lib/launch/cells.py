"""Notebook cells in tracebacks: a rank has no notebook, so the parent lends it the cells' text, and names the cells in what comes back."""

from __future__ import annotations

import linecache
import os
import re
import sys


def cell_sources() -> dict[str, list[str]]:
    """The lines of every cell run so far, by the file name its code carries; empty outside a notebook."""
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and _is_cell(name)}


def lend(sources: dict[str, list[str]]) -> None:
    """Make tracebacks of this process show those lines."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def name_cells(text: str) -> str:
    """``text`` with the made-up file names of cells replaced by ``Cell In[n]``, as the notebook shows them."""
    return re.sub(r'File "([^"]+)", line', lambda match: f"{_shown(match[1])}, line", text)


def _is_cell(name: str) -> bool:
    return ("ipykernel_" in name or name.startswith("<ipython-input-")) and not os.path.exists(name)


def _shown(file: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    count = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return f'File "{file}"' if count is None else f"Cell In[{count}]"
