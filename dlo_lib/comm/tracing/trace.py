"""A trace of communication: every call of one rank or of all ranks, its moments, and questions about them.

``payload_bytes`` and ``ring_bytes`` are those of ``comm.calls``. The backend works on a call from ``issued``
to ``done``; in a trace of all ranks it is known when all of them had called, and no data moves before that.
The process waits for the call from ``waited_from`` to ``waited_until``; its computation before that overlaps
with the communication and hides it. Times are seconds since the start of the trace, on the clock that all
ranks of a machine share.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from dlo_lib.base.text import columns
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.events import Event, Moment
from dlo_lib.comm.tracing.matching import match_events
from dlo_lib.comm.tracing.perfetto import write_perfetto

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NotTraced(RuntimeError):
    """The trace does not know the answer to a question."""


class Trace:
    """The events of one rank or of several ranks, in the order of issue."""

    def __init__(
        self, events: Iterable[Event] = (), seconds: float = 0.0, unavailable: str = "", began: int = 0
    ) -> None:
        self._events = list(events)
        self.seconds = seconds
        self.spans: dict[int, tuple[float, float]] = {}
        """Start and end of the trace of each rank, in seconds."""
        self.began = began
        """Time zero, in ``time.monotonic_ns``, a clock that all ranks of a machine share."""
        self.unavailable = unavailable
        """Why nothing was traced: the tap does not know torch's internals. "" if the trace is available."""

    @property
    def events(self) -> list[Event]:
        """Every call.

        Raises:
            NotTraced: nothing was traced, so the absence of calls says nothing. All questions raise this
                error.
        """
        if self.unavailable:
            raise NotTraced(f"nothing was traced: {self.unavailable}")
        return self._events

    @events.setter
    def events(self, events: list[Event]) -> None:
        self._events = events

    def select(self, kind: Kind | str | None = None, rank: int | None = None) -> list[Event]:
        """Return the events of ``kind`` and ``rank``; None selects all."""
        wanted = Kind(kind) if isinstance(kind, str) else kind
        return [
            event for event in self.events if wanted in (None, event.call.kind) and rank in (None, event.rank)
        ]

    def calls(self, rank: int, kind: Kind | None = None) -> list[Call]:
        """Return the calls of ``rank`` in the order of issue, of one kind or all.

        ``Run.calls`` returns the same.
        """
        return [event.call for event in self.select(kind, rank)]

    def order(self, rank: int) -> list[tuple[Moment, Call]]:
        """Return the steps of ``rank`` in order: it issued a call, began to wait for it, or ended the wait.

        A gather that is issued before the wait for the previous gather begins was prefetched, at any speed of
        the machine.
        """
        steps = [
            (moment, step, event.call) for event in self.select(rank=rank) for step, moment in event.moments()
        ]
        return [(step, call) for _, step, call in sorted(steps, key=lambda item: item[0])]

    def count(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Return the number of calls."""
        return len(self.select(kind, rank))

    def bytes(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Return the payload in bytes: the size of the full tensors."""
        return sum(event.call.payload_bytes for event in self.select(kind, rank))

    def ring_bytes(self, kind: Kind | str | None = None, rank: int | None = None) -> float:
        """Return the bytes that ring algorithms send for these calls."""
        return sum(event.call.ring_bytes for event in self.select(kind, rank))

    def max_unsharded(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Return the bytes of the largest full tensor of a single call.

        For all-gathers this is the largest part of a model that a rank requests as a whole. A trace does not
        know when it is freed.
        """
        return max((event.call.payload_bytes for event in self.select(kind, rank)), default=0)

    def max_in_flight(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Return the largest number of bytes (of full tensors) in flight at one moment on any one rank.

        A call whose end is not known counts until the end of the trace.
        """
        most = 0
        for own in {event.rank for event in self.select(kind, rank)}:
            events = self.select(kind, own)
            moments = [(event.issued, event.call.payload_bytes) for event in events]
            moments += [(event.over, -event.call.payload_bytes) for event in events if event.over is not None]
            held = 0
            for _, change in sorted(moments):
                held += change
                most = max(most, held)
        return most

    def hidden(self, kind: Kind | str | None = None, rank: int | None = None) -> float | None:
        """Return the share of communication time in which the process did not wait, 0 to 1; None if unknown.

        In a trace of all ranks, communication begins when all ranks have called; a wait for a late rank is
        not communication. For ``isend`` and ``irecv`` only an upper bound of the end is known, so the share
        is an upper bound too.
        """
        events = self.select(kind, rank)
        busy = sum(event.communicating for event in events)
        return 1 - sum(event.exposed for event in events) / busy if busy else None

    def plot(self, title: str | None = None, start: float = 0.0, end: float | None = None) -> Figure:
        """Draw a timeline of the ranks: computing, waiting, calls in flight; see ``comm.tracing.timeline``.

        Args:
            title: None for a summary of the trace.
            start: seconds since the start of the trace.
            end: seconds since the start of the trace; None for its end.

        Raises:
            NotTraced: nothing was traced.
            ValueError: ``end`` is not after ``start``.
        """
        from dlo_lib.comm.tracing.timeline import Picture, plot  # imports matplotlib, which ranks do not need

        picture = Picture(self.events, self.spans, self.seconds)
        return plot(picture, self._heading() if title is None else title, start, end)

    def to_perfetto(self, file: str | Path) -> Path:
        """Write the trace for https://ui.perfetto.dev or ``chrome://tracing``; return the path.

        Raises:
            NotTraced: nothing was traced.
        """
        return write_perfetto(self.events, self.seconds, file)

    def _heading(self) -> str:
        share = self.hidden()
        bound = "at most " if any(event.done is None for event in self.events) else ""
        share_text = "" if share is None else f", {bound}{share:.0%} of the communication hidden"
        return f"{self.count()} calls in {1e3 * self.seconds:.1f} ms{share_text}"

    def never_waited(self) -> list[Event]:
        """Return the asynchronous calls that the program never waited for."""
        return [event for event in self.events if event.waited_until is None and event.call.is_async]

    def summary(self) -> str:
        """Return a table with one line per kind over all ranks: calls, bytes, times, and the hidden share.

        "communicating" lasts from the moment at which all ranks had called (in a trace of one rank: from
        issue) to the end. "exposed" is the part of it in which the process waited. "late ranks" is the wait
        before it. For ``isend`` and ``irecv`` only an upper bound of the end is known, so their line says "at
        most". A call whose end is unknown counts as 0.
        """
        if self.unavailable:
            return f"no trace: {self.unavailable}"
        rows = [("operation", "calls", "payload", "ring", "communicating", "exposed", "hidden", "late ranks")]
        for kind in sorted({event.call.kind for event in self.events}, key=lambda kind: kind.value):
            events, share = self.select(kind), self.hidden(kind)
            bound = (
                "at most " if any(event.done is None and event.over is not None for event in events) else ""
            )
            busy, exposed, late = (
                sum(map(attrgetter(name), events)) for name in ("communicating", "exposed", "late")
            )
            hidden = "-" if share is None else f"{bound}{share:.0%}"
            known = any(event.all_called is not None for event in events)
            times = (
                f"{bound}{busy * 1e3:.1f} ms",
                f"{exposed * 1e3:.1f} ms",
                hidden,
                f"{late * 1e3:.1f} ms" if known else "-",
            )
            rows.append(
                (kind.value, str(len(events)), size(self.bytes(kind)), size(self.ring_bytes(kind)), *times)
            )
        return columns(rows)

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """Return one trace of several ranks of a machine, in the order of issue.

        Times count from the earliest start.
        """
        parts = list(traces)
        began = min((part.began for part in parts), default=0)
        later = [(part, (part.began - began) / 1e9) for part in parts]
        events = sorted(
            (event.shifted(by) for part, by in later for event in part._events),
            key=lambda event: event.issued,
        )
        match_events(events)
        unavailable = next((part.unavailable for part in parts if part.unavailable), "")
        trace = cls(events, max((part.seconds + by for part, by in later), default=0.0), unavailable, began)
        trace.spans = {
            rank: (start + by, end + by) for part, by in later for rank, (start, end) in part.spans.items()
        }
        return trace


def size(count: float) -> str:
    """Return a number of bytes with a binary unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
