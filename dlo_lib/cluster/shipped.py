"""A function as a job: it is written down with its arguments where the job finds it, called on every rank, and its result written back.

The function travels by value (``launch.values``), with the caller's module path and the sources of notebook cells. What is read here is
what this user wrote, in a folder of this user's, by the same interpreter (``dlo_lib.cluster.call``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlo_lib.errors import UserError
from dlo_lib.files import write_aside, write_text
from dlo_lib.text import tr

CALL, AROUND = "call.pkl", "call.json"


def pack(fn: Callable[..., Any], arguments: Mapping[str, Any], sweep: Sequence[Mapping[str, Any]]) -> bytes:
    """``fn(**arguments, **settings)`` for each ``settings`` of ``sweep``.

    Raises:
        UserError: it cannot be sent to another process.
    """
    from dlo_lib.launch.values import pack_call

    return pack_call(fn, (), {"arguments": dict(arguments), "sweep": list(sweep)})


def leave(folder: Path, call: bytes) -> None:
    """Write a packed call where the job looks for it."""
    from dlo_lib.launch.frames import cell_sources

    with write_aside(folder / CALL) as aside:
        aside.write_bytes(call)
    write_text(folder / AROUND, json.dumps({"path": sys.path, "sources": cell_sources()}))


def result(folder: Path, element: int) -> Any:
    """What rank 0 of an element returned.

    Raises:
        UserError: it has returned nothing yet, or was no function.
    """
    from dlo_lib.launch.values import unpack_result

    file = result_file(folder, element)
    if not (folder / CALL).exists():
        raise UserError(tr("this job runs a program, which returns nothing: read its files in {folder}", folder=folder / "out"))
    if not file.exists():
        raise UserError(tr("element {element} has not returned: wait() for it, logs() shows what it printed", element=element))
    return unpack_result(file.read_bytes())


def result_file(folder: Path, element: int) -> Path:
    return folder / "results" / f"{element}.pkl"
