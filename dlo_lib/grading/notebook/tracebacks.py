"""One line in a notebook instead of a traceback, for a step that is not written yet, for a ``UserError`` and
for an interrupt; and one line below the traceback of a name whose cell has not run.

The stub of a step raises ``NotImplementedError()``. *Run All* in an untouched notebook stops there, and a
traceback without a message says nothing of what to do. The message of a ``UserError`` says it all, and the
lines of this library above it say nothing to a student.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.notebook.defining_cell import where_defined
from dlo_lib.grading.notebook.interrupts import interrupt_sentence
from dlo_lib.grading.notebook.undefined_names import undefined_name
from dlo_lib.launch.failure import RankFailure

WORKER_ERROR = re.compile(r"Caught NotImplementedError in DataLoader worker process \d+\.\n")
FRAME_NAME = re.compile(r'^  File ".+", line \d+, in (\w+)$', re.MULTILINE)


def stub_of_a_worker(message: str) -> str:
    """Return the name of the stub that raised in a worker of a ``DataLoader``, from the message that it
    makes of the traceback of the worker; "" for another error.
    """
    raised = WORKER_ERROR.match(message) and message.rstrip().endswith("\nNotImplementedError")
    names = FRAME_NAME.findall(message) if raised else []
    return names[-1] if names else ""


def shorten_tracebacks(namespace: MutableMapping[str, Any], notebook: Path) -> None:
    """Explain stubs that raise in the cells of this notebook, whose ``globals()`` is ``namespace`` and whose
    file is ``notebook``; show only the message of a ``UserError``; name the cell of an undefined name.

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
        if isinstance(error, UserError):
            print(error, file=sys.stderr)
            return
        if isinstance(error, KeyboardInterrupt):
            print(interrupt_sentence(error, trace), file=sys.stderr)
            return
        if missing := undefined_name(error):
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            if words := where_defined(notebook, missing):
                print(words, file=sys.stderr)
            return
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        name = stub_of_a_worker(str(error))
        if not name and (error.args or not frames or frames[-1].f_globals is not namespace):
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            return
        name = name or frames[-1].f_code.co_name
        print(
            tr(
                "{name} is not written yet: write it in its cell (# YOUR CODE HERE), run that cell, and then "
                "this one.",
                name=tr("This step") if name == "<module>" else name,
            ),
            file=sys.stderr,
        )

    kinds = (NotImplementedError, UserError, NameError, RankFailure, KeyboardInterrupt)
    running.set_custom_exc(kinds, explain)
