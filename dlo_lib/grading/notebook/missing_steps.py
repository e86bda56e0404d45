"""One line in a notebook for a step that is not written yet, instead of an empty ``NotImplementedError``.

The stub of a step raises ``NotImplementedError()``. *Run All* in an untouched notebook stops there, and a
traceback without a message says nothing of what to do.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

from dlo_lib.text import tr


def explain_missing_steps(namespace: MutableMapping[str, Any]) -> None:
    """Explain stubs that raise in the cells of this notebook, whose ``globals()`` is ``namespace``.

    Does nothing outside IPython.
    """
    ipython = sys.modules.get("IPython")
    running = ipython.get_ipython() if ipython is not None else None
    if running is None:
        return

    def explain(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType,
        tb_offset: int | None = None,
    ) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        if error.args or not frames or frames[-1].f_globals is not namespace:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            return
        name = frames[-1].f_code.co_name
        print(
            tr(
                "{name} is not written yet: write it in its cell (# YOUR CODE HERE), run that cell, and then "
                "this one.",
                name=tr("This step") if name == "<module>" else name,
            ),
            file=sys.stderr,
        )

    running.set_custom_exc((NotImplementedError,), explain)
