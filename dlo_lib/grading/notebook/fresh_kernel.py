"""An extension of IPython for kernels in which no cell of a lab has run yet: an undefined name, such as
``lab`` after a restart, names the cell to run.

``dlo lab`` and the Hub start kernels with ``--ext=dlo_lib.grading.notebook.fresh_kernel``. The cell with
``Lab(globals())`` then replaces it by ``tracebacks``, which explains more. It costs a few milliseconds at the
start of a kernel, because it imports no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.course import LAB_FILE, read_lab_info
from dlo_lib.grading.notebook.defining_cell import where_defined

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

NAME = __name__
"""What ``--ext`` takes."""


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Explain undefined names in notebooks of labs."""

    def explain(
        shell: Any,
        kind: type[BaseException],
        error: NameError,
        trace: TracebackType,
        tb_offset: int | None = None,
    ) -> None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        if words := cell_to_run(str(error.name or ""), Path.cwd()):
            print(words, file=sys.stderr)

    ipython.set_custom_exc((NameError,), explain)


def cell_to_run(name: str, folder: Path) -> str:
    """Return the sentence that names the cell which defines ``name`` in the lab's notebook in ``folder``; ""
    if there is no lab, or no such cell.
    """
    if not (folder / LAB_FILE).is_file():
        return ""
    try:
        return where_defined(folder / read_lab_info(folder).notebook, name)
    except UserError:  # a damaged lab.toml: the cell with Lab(globals()) reports it, with the cure
        return ""
