"""The events of a trace: each is one communication call and its moments."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from dlo_lib.comm.calls import Call


class Moment(enum.Enum):
    """What a process does with a call, in this order."""

    ISSUED = "issued"
    WAITS = "waits"
    WAITED = "has waited"


@dataclass(slots=True)
class Event:
    """One call in a trace, with its moments in seconds since the start of the trace.

    None is a moment that is not known or did not occur.
    """

    rank: int
    call: Call
    issued: float
    """When the program made the call."""
    done: float | None = None
    """When the backend finished, also without a wait. For a blocking call: the end of its wait.
    None if it had not finished at the end of the trace, or if the end is not known (``isend``, ``irecv``,
    work
    captured into a CUDA graph); see ``over``."""
    waited_from: float | None = None
    """When the process began to wait for the call."""
    waited_until: float | None = None
    """When that wait ended; on a GPU this is immediate, because the stream waits instead of the process."""
    all_called: float | None = None
    """When the last participant made its call; known in a trace of all participants."""
    arrived: float | None = None
    """For a sent message: upper bound of its arrival; known in a trace of both ranks."""

    def moments(self) -> Iterator[tuple[Moment, float]]:
        """Yield the moments of the process itself that occurred."""
        for moment, when in (
            (Moment.ISSUED, self.issued),
            (Moment.WAITS, self.waited_from),
            (Moment.WAITED, self.waited_until),
        ):
            if when is not None:
                yield moment, when

    @property
    def over(self) -> float | None:
        """Upper bound of the end: ``done``, or the end of this rank's or of the receiver's wait."""
        if self.done is not None:
            return self.done
        return min(
            (moment for moment in (self.waited_until, self.arrived) if moment is not None), default=None
        )

    @property
    def begun(self) -> float:
        """When data could start to move: once all participants, or this rank if unknown, had called."""
        return self.issued if self.all_called is None else self.all_called

    @property
    def communicating(self) -> float:
        """Seconds from ``begun`` to ``over``; 0 if the end is not known."""
        return 0.0 if self.over is None else max(0.0, self.over - self.begun)

    @property
    def exposed(self) -> float:
        """Seconds of ``communicating`` in which the process waited."""
        if self.waited_from is None or self.over is None:
            return 0.0
        return max(0.0, self.over - max(self.waited_from, self.begun))

    @property
    def late(self) -> float:
        """Seconds of waiting before ``begun``, because another rank had not called yet; 0 if not known."""
        if self.waited_from is None or self.waited_until is None:
            return 0.0
        return max(0.0, min(self.begun, self.waited_until) - self.waited_from)

    def shifted(self, seconds: float) -> Event:
        """Return a copy whose times are larger by ``seconds``, for a trace that started earlier."""
        own = (self.done, self.waited_from, self.waited_until, self.all_called, self.arrived)
        return Event(
            self.rank,
            self.call,
            self.issued + seconds,
            *(None if moment is None else moment + seconds for moment in own),
        )
