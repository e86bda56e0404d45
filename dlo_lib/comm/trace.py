"""A trace of communication: every call of one rank or of all, when it was issued and waited for, and the questions one asks of it.

``payload_bytes`` and ``ring_bytes`` are those of ``comm.calls``. Times are seconds since the trace began, the same clock for all ranks of
a machine. Between ``waited_from`` and ``waited_until`` the process stood still for the call; what lies between ``issued`` and
``waited_from`` ran beside it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.text import columns


@dataclass(slots=True)
class Event:
    """One call in a trace. ``waited_from`` and ``waited_until`` are None when nobody waited for it."""

    rank: int
    call: Call
    issued: float
    waited_from: float | None = None
    waited_until: float | None = None
    done: float | None = None
    """When the backend had finished, where that is known: at the latest when the wait was over."""


class Trace:
    """Events in the order of issue, of one rank or of several."""

    def __init__(self, events: Iterable[Event] = (), seconds: float = 0.0, unavailable: str = "") -> None:
        self.events = list(events)
        self.seconds = seconds
        self.unavailable = unavailable
        """Why nothing was traced: torch's internals are not as the tap knows them. Empty when all is well."""

    def select(self, kind: Kind | str | None = None, rank: int | None = None) -> list[Event]:
        """The events of that kind and rank, all for None."""
        wanted = Kind(kind) if isinstance(kind, str) else kind
        return [event for event in self.events if wanted in (None, event.call.kind) and rank in (None, event.rank)]

    def count(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        return len(self.select(kind, rank))

    def bytes(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Payload: the size of the full tensors."""
        return sum(event.call.payload_bytes for event in self.select(kind, rank))

    def ring_bytes(self, kind: Kind | str | None = None, rank: int | None = None) -> float:
        """What ring algorithms send for it."""
        return sum(event.call.ring_bytes for event in self.select(kind, rank))

    def never_waited(self) -> list[Event]:
        """Asynchronous calls whose result was used, if at all, without a wait."""
        return [event for event in self.events if event.waited_until is None and event.call.is_async]

    def summary(self) -> str:
        """A table: one line per rank, kind, type and size."""
        if self.unavailable:
            return f"no trace: {self.unavailable}"
        groups: dict[tuple, list[Event]] = defaultdict(list)
        for event in self.events:
            groups[event.rank, event.call.kind.value, event.call.dtype, event.call.payload_bytes].append(event)
        rows = [("rank", "operation", "dtype", "calls", "payload", "ring", "waited")]
        for (rank, kind, dtype, payload), events in sorted(groups.items()):
            waited = sum((event.waited_until or 0.0) - (event.waited_from or 0.0) for event in events)
            ring = sum(event.call.ring_bytes for event in events)
            rows.append((str(rank), kind, dtype, str(len(events)), size(payload * len(events)), size(ring), f"{waited * 1e3:.1f} ms"))
        return columns(rows)

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """The traces of several ranks as one, in the order of issue."""
        parts = list(traces)
        events = sorted((event for part in parts for event in part.events), key=lambda event: event.issued)
        unavailable = next((part.unavailable for part in parts if part.unavailable), "")
        return cls(events, max((part.seconds for part in parts), default=0.0), unavailable)


class Recorder:
    """The listener that fills a trace."""

    def __init__(self, rank: int, origin: int) -> None:
        self.rank, self.origin = rank, origin
        self.events: dict[int, Event] = {}

    def issued(self, call: Call) -> None:
        self.events[call.number] = Event(self.rank, call, self._seconds(call.issued))

    def waits(self, call: Call) -> None:
        if (event := self.events.get(call.number)) is not None and event.waited_from is None:
            event.waited_from = self._seconds(time.monotonic_ns())

    def waited(self, call: Call, failed: bool) -> None:
        if (event := self.events.get(call.number)) is not None and not failed:
            event.waited_until = event.done = self._seconds(time.monotonic_ns())

    def _seconds(self, moment: int) -> float:
        return (moment - self.origin) / 1e9


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextmanager
def trace_collectives() -> Iterator[Trace]:
    """Trace the communication of this process, which must have a process group, within the context; read the trace afterwards.

    Where torch's internals are not as the tap knows them, the trace is empty and says so in ``unavailable``: nothing breaks.
    """
    import torch.distributed as dist

    from dlo_lib.comm.listening import listening
    from dlo_lib.comm.tap import TapUnavailable

    trace = Trace()
    recorder = Recorder(dist.get_rank(), time.monotonic_ns())
    try:
        with listening(recorder):
            yield trace
    except TapUnavailable as error:
        trace.unavailable = str(error)
        yield trace
    finally:
        trace.events = list(recorder.events.values())
        trace.seconds = (time.monotonic_ns() - recorder.origin) / 1e9
