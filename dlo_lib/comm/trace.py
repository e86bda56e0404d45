"""A trace of communication: every call of one rank or of all, when it was issued and waited for, and the questions one asks of it.

``payload_bytes`` and ``ring_bytes`` are those of ``comm.calls``. The backend has a call from ``issued`` to ``done``; in a trace of all
ranks it is known when all had called, before which nothing travels. The process stands still for it from ``waited_from`` to
``waited_until``; what it computed before that ran beside the communication and hid it. Times are seconds since the trace began, by the
clock that all ranks of a machine share.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.meetings import tell_each_other
from dlo_lib.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Moment(enum.Enum):
    """What a process does with a call."""

    ISSUED = "issued"
    WAITS = "waits"
    WAITED = "has waited"


@dataclass(slots=True)
class Event:
    """One call in a trace, with its moments in seconds since the trace began; None is a moment that is not known or did not come."""

    rank: int
    call: Call
    issued: float
    """When the program called."""
    done: float | None = None
    """When the backend had finished, whether or not anybody waited yet. A blocking call's is the end of its wait. None: it had not finished
    when the trace ended, or does not tell (``isend`` and ``irecv``; what a CUDA graph captured): see ``over``."""
    waited_from: float | None = None
    """When the process began to wait for it."""
    waited_until: float | None = None
    """When that wait was over; on a GPU, where waiting is left to the stream, at once."""
    all_called: float | None = None
    """When the last of those it takes had called; known in a trace of all of them."""
    arrived: float | None = None
    """Of a message sent: when its receiver had it, at the latest; known in a trace of both."""

    def moments(self) -> Iterator[tuple[Moment, float]]:
        """Those of the process itself, as far as they came."""
        for moment, when in ((Moment.ISSUED, self.issued), (Moment.WAITS, self.waited_from), (Moment.WAITED, self.waited_until)):
            if when is not None:
                yield moment, when

    @property
    def over(self) -> float | None:
        """The moment by which it certainly was over: ``done``, or the end of the wait, or of the receiver's."""
        if self.done is not None:
            return self.done
        return min((moment for moment in (self.waited_until, self.arrived) if moment is not None), default=None)

    @property
    def begun(self) -> float:
        """When something could travel: when all had called, as far as that is known; else when this rank did."""
        return self.issued if self.all_called is None else self.all_called

    @property
    def communicating(self) -> float:
        """Seconds from there to the end, or to the latest moment at which it can have ended; 0 where neither is known."""
        return 0.0 if self.over is None else max(0.0, self.over - self.begun)

    @property
    def exposed(self) -> float:
        """Seconds of that for which the process stood still."""
        if self.waited_from is None or self.over is None:
            return 0.0
        return max(0.0, self.over - max(self.waited_from, self.begun))

    @property
    def late(self) -> float:
        """Seconds for which it stood still before that, because another rank had not called yet; 0 where that is not known."""
        if self.waited_from is None or self.waited_until is None:
            return 0.0
        return max(0.0, min(self.begun, self.waited_until) - self.waited_from)

    def later(self, seconds: float) -> Event:
        """The same, with times that count from so much earlier."""
        own = (self.done, self.waited_from, self.waited_until, self.all_called, self.arrived)
        return Event(self.rank, self.call, self.issued + seconds, *(None if moment is None else moment + seconds for moment in own))


class NotTraced(RuntimeError):
    """A question to a trace of which the answer is not known."""


class Trace:
    """Events in the order of issue, of one rank or of several."""

    def __init__(self, events: Iterable[Event] = (), seconds: float = 0.0, unavailable: str = "", began: int = 0) -> None:
        self._events = list(events)
        self.seconds = seconds
        self.spans: dict[int, tuple[float, float]] = {}
        """When the trace of each rank began and ended, in seconds."""
        self.began = began
        """The moment from which times count, in ``time.monotonic_ns``, which the ranks of one machine share."""
        self.unavailable = unavailable
        """Why nothing was traced: torch's internals are not as the tap knows them. Empty when all is well."""

    @property
    def events(self) -> list[Event]:
        """Every call; raises ``NotTraced`` where nothing was traced, as all questions do: no calls seen is not no calls made."""
        if self.unavailable:
            raise NotTraced(f"nothing was traced: {self.unavailable}")
        return self._events

    @events.setter
    def events(self, events: list[Event]) -> None:
        self._events = events

    def select(self, kind: Kind | str | None = None, rank: int | None = None) -> list[Event]:
        """The events of that kind and rank, all for None."""
        wanted = Kind(kind) if isinstance(kind, str) else kind
        return [event for event in self.events if wanted in (None, event.call.kind) and rank in (None, event.rank)]

    def calls(self, rank: int, kind: Kind | None = None) -> list[Call]:
        """The calls of ``rank``, in the order of issue, of one kind or all: what ``Run.calls`` gives the checks of a lab."""
        return [event.call for event in self.select(kind, rank)]

    def order(self, rank: int) -> list[tuple[Moment, Call]]:
        """What ``rank`` did, one after the other: it issued a call, began to wait, or had waited. An order, not a stopwatch.

        So a gather that is issued before the wait for the one before begins was fetched ahead, however fast or slow the machine is.
        """
        steps = [(moment, step, event.call) for event in self.select(rank=rank) for step, moment in event.moments()]
        return [(step, call) for _, step, call in sorted(steps, key=lambda item: item[0])]

    def count(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        return len(self.select(kind, rank))

    def bytes(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Payload: the size of the full tensors."""
        return sum(event.call.payload_bytes for event in self.select(kind, rank))

    def ring_bytes(self, kind: Kind | str | None = None, rank: int | None = None) -> float:
        """What ring algorithms send for it."""
        return sum(event.call.ring_bytes for event in self.select(kind, rank))

    def max_unsharded(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Bytes of the largest full tensor of a single call: of all-gathers, of how much of a model a rank asks to be whole at once.

        When it was freed again, a trace cannot know.
        """
        return max((event.call.payload_bytes for event in self.select(kind, rank)), default=0)

    def max_in_flight(self, kind: Kind | str | None = None, rank: int | None = None) -> int:
        """Bytes of the full tensors on their way at the same moment, at most, on any one rank; what was never over counts to the end."""
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
        """The share of the time of communication in which the process went on, 0 to 1; None where no end is known.

        In a trace of all ranks that time begins when all have called; standing still for a late rank is not communication. Of ``isend`` and
        ``irecv``, whose end is known at the latest only, it is an upper bound.
        """
        events = self.select(kind, rank)
        busy = sum(event.communicating for event in events)
        return 1 - sum(event.exposed for event in events) / busy if busy else None

    def plot(self, title: str | None = None, start: float = 0.0, end: float | None = None) -> Figure:
        """A timeline of the ranks: computing, waiting, and what travels meanwhile; see ``comm.timeline``.

        Raises:
            NotTraced: nothing was traced.
            ValueError: ``end`` is not after ``start`` (seconds since the trace began).
        """
        from dlo_lib.comm.timeline import plot  # matplotlib, which ranks do not need

        return plot(self, title, start, end)

    def never_waited(self) -> list[Event]:
        """Asynchronous calls whose result was used, if at all, without a wait."""
        return [event for event in self.events if event.waited_until is None and event.call.is_async]

    def summary(self) -> str:
        """A table, one line per kind over all ranks: calls, bytes, milliseconds, and the share of the communication that was hidden.

        Communicating is from when all had called (in a trace of one rank: from issue) to the end; exposed, what of it the process stood
        still for; late ranks, for how long it stood still before. Of ``isend`` and ``irecv`` only the latest end is known, so their line
        says "at most". What was never over counts as nothing.
        """
        if self.unavailable:
            return f"no trace: {self.unavailable}"
        rows = [("operation", "calls", "payload", "ring", "communicating", "exposed", "hidden", "late ranks")]
        for kind in sorted({event.call.kind for event in self.events}, key=lambda kind: kind.value):
            events, share = self.select(kind), self.hidden(kind)
            bound = "at most " if any(event.done is None and event.over is not None for event in events) else ""
            busy, exposed, late = (sum(map(attrgetter(name), events)) for name in ("communicating", "exposed", "late"))
            hidden = "-" if share is None else f"{bound}{share:.0%}"
            known = any(event.all_called is not None for event in events)
            times = (f"{bound}{busy * 1e3:.1f} ms", f"{exposed * 1e3:.1f} ms", hidden, f"{late * 1e3:.1f} ms" if known else "-")
            rows.append((kind.value, str(len(events)), size(self.bytes(kind)), size(self.ring_bytes(kind)), *times))
        return columns(rows)

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """The traces of several ranks of a machine as one, in the order of issue; times count from the beginning of the first."""
        parts = list(traces)
        began = min((part.began for part in parts), default=0)
        later = [(part, (part.began - began) / 1e9) for part in parts]
        events = sorted((event.later(by) for part, by in later for event in part._events), key=lambda event: event.issued)
        tell_each_other(events)
        unavailable = next((part.unavailable for part in parts if part.unavailable), "")
        trace = cls(events, max((part.seconds + by for part, by in later), default=0.0), unavailable, began)
        trace.spans = {rank: (start + by, end + by) for part, by in later for rank, (start, end) in part.spans.items()}
        return trace


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

    Seen is what passes torch's dispatcher, whoever calls; not seen are calls on a backend object itself, the key-value store, symmetric
    memory and other processes (``comm.tap``). Where torch's internals are not as the tap knows them, the program runs on with a warning,
    ``unavailable`` says why, and questions raise ``NotTraced``.
    """
    from dlo_lib.comm.recording import recording  # which needs torch: a trace can be read without

    trace = Trace()
    with recording(trace):
        yield trace
