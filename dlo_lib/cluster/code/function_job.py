"""A function as a job: it is saved with its arguments and called on every rank; rank 0 saves its result.

The function is sent by value (``launch.values``), with the caller's module path and the sources of notebook
cells. The files that are unpickled were written by the same user, in the user's folder, with the same
interpreter (``dlo_lib.cluster.code.function_rank``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_aside, write_text
from dlo_lib.base.text import tr

CALL, CONTEXT = "call.pkl", "call.json"


def pack(
    fn: Callable[..., Any], arguments: Mapping[str, Any], sweep: Sequence[Mapping[str, Any]]
) -> tuple[bytes, set[str]]:
    """Pack the calls ``fn(**arguments, **settings)``, one for each ``settings`` of ``sweep``.

    Return them, and the names of the modules that they import.

    Raises:
        UserError: the function or a value cannot be sent to another process.
    """
    from dlo_lib.launch.values import pack_call

    modules: set[str] = set()
    call = pack_call(fn, (), {"arguments": dict(arguments), "sweep": list(sweep)}, modules)
    return call, modules


def write(folder: Path, call: bytes, path: Sequence[str] = ()) -> None:
    """Write a packed call to the job's folder; ``path`` comes first in the module path of its process."""
    from dlo_lib.launch.frames import cell_sources

    with write_aside(folder / CALL) as aside:
        aside.write_bytes(call)
    context = {
        "copies": list(path),
        "path": sys.path,
        "sources": cell_sources(),
        "python": list(sys.version_info[:2]),
    }
    write_text(folder / CONTEXT, json.dumps(context))


def result(folder: Path, element: int) -> Any:
    """Return the result of rank 0 of an element.

    Raises:
        UserError: the element has not returned yet, or the job is not a function.
    """
    from dlo_lib.launch.values import unpack_result

    file = result_file(folder, element)
    if not (folder / CALL).exists():
        raise UserError(
            tr(
                "this job runs a program, which returns nothing: read its files in {folder}",
                folder=folder / "out",
            )
        )
    if not file.exists():
        raise UserError(
            tr("element {element} has not returned: wait() for it; logs() shows its output", element=element)
        )
    return unpack_result(file.read_bytes())


def result_file(folder: Path, element: int) -> Path:
    """Return the file of an element's result."""
    return folder / "results" / f"{element}.pkl"
