"""Filling a trace: the listener that notes when each call was issued, was over, and was waited for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch.distributed as dist
from torch.distributed import Work

from dlo_lib.comm.calls import Call
from dlo_lib.comm.completion import CompletionClock
from dlo_lib.comm.listening import listening
from dlo_lib.comm.tap import TapUnavailable
from dlo_lib.comm.trace import Event, Trace


class Recorder:
    """Events by the number of their call; times are seconds since ``origin``, a moment of ``time.monotonic_ns``."""

    def __init__(self, rank: int, origin: int) -> None:
        self.rank, self.origin = rank, origin
        self.events: dict[int, Event] = {}
        self.clock = CompletionClock(self._done)
        self._queued: set[int] = set()
        """Calls whose wait says nothing about their end: they were left to a stream of the GPU."""

    def issued(self, call: Call) -> None:
        self.events[call.number] = Event(self.rank, call, self._seconds(call.issued))

    def running(self, call: Call, work: Work, on_device: bool) -> None:
        if on_device:
            self._queued.add(call.number)
        if on_device or call.is_async:
            self.clock.start(call, work, on_device)

    def waits(self, call: Call) -> None:
        if (event := self.events.get(call.number)) is not None and event.waited_from is None:
            event.waited_from = self._seconds(time.monotonic_ns())

    def waited(self, call: Call, failed: bool) -> None:
        if (event := self.events.get(call.number)) is not None and not failed:
            event.waited_until = self._seconds(time.monotonic_ns())
            # The backend's thread wakes who waits before it tells the time: what a wait has seen the end of is over by then.
            if call.number not in self._queued and not (call.is_async and call.kind.point_to_point) and event.done is None:
                event.done = event.waited_until

    def _done(self, number: int, moment: int) -> None:
        event, done = self.events[number], self._seconds(moment)
        event.done = done if event.done is None else min(event.done, done)

    def _seconds(self, moment: int) -> float:
        return (moment - self.origin) / 1e9


@contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Fill ``trace`` with what this process communicates within the context."""
    recorder = Recorder(dist.get_rank(), time.monotonic_ns())
    with ExitStack() as stack:
        try:
            stack.enter_context(listening(recorder))
        except TapUnavailable as error:
            trace.unavailable = str(error)
            _warn_once(trace.unavailable)
        try:
            yield
        finally:
            recorder.clock.stop()
            trace.began = recorder.origin
            trace.events = list(recorder.events.values())
            trace.seconds = (time.monotonic_ns() - recorder.origin) / 1e9
            trace.spans = {recorder.rank: (0.0, trace.seconds)}


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"communication is not traced: {reason}", RuntimeWarning, stacklevel=2)
