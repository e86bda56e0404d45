"""Export of a trace as a file that https://ui.perfetto.dev and ``chrome://tracing`` open.

The file follows the *Trace Event Format* of Chrome: each rank is a process, with one row for its waits and
one row for each kind of call. Calls of a kind may overlap, so they are asynchronous events (``b`` and ``e``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dlo_lib.base.files import write_text
from dlo_lib.comm.tracing.events import Event

MICROSECONDS = 1e6
THREAD = 1  # of the waits; 0 is the idle thread of Linux, which viewers treat apart


def write_perfetto(events: Iterable[Event], seconds: float, file: str | Path) -> Path:
    """Write ``events`` to ``file`` and return its path.

    Args:
        seconds: the end of the trace; a call whose end is not known is drawn until there.
    """
    path = Path(file)
    entries = [entry for number, event in enumerate(events) for entry in _entries(number, event, seconds)]
    ranks = sorted({entry["pid"] for entry in entries})
    names = [
        {"ph": "M", "name": of, "pid": rank, "tid": THREAD, "args": args}
        for rank in ranks
        for of, args in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": rank}),
            ("thread_name", {"name": "waits"}),
        )
    ]
    write_text(path, json.dumps({"traceEvents": [*names, *entries], "displayTimeUnit": "ms"}))
    return path


def _entries(number: int, event: Event, seconds: float) -> Iterator[dict[str, Any]]:
    call = event.call
    shared = {"pid": event.rank, "tid": THREAD, "name": call.kind.value}
    end = max(event.begun, seconds if event.over is None else event.over)
    described = {
        "payload bytes": call.payload_bytes,
        "group": call.group,
        "end known": event.over is not None,
    }
    asynchronous = shared | {"cat": call.kind.value, "id": number}
    yield asynchronous | {"ph": "b", "ts": event.begun * MICROSECONDS, "args": described}
    yield asynchronous | {"ph": "e", "ts": end * MICROSECONDS}
    if event.waited_from is not None:
        until = end if event.waited_until is None else event.waited_until
        waited = {"ts": event.waited_from * MICROSECONDS, "dur": (until - event.waited_from) * MICROSECONDS}
        yield shared | {"ph": "X", "cat": "wait", "name": f"waits for {call.kind.value}"} | waited
