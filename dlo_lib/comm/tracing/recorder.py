"""The recorder that fills a trace: it notes when each call is issued, ends, and is waited for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch.distributed as dist
from torch.distributed import Work

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.completion import CompletionClock
from dlo_lib.comm.tracing.events import Event
from dlo_lib.comm.tracing.listeners import listening
from dlo_lib.comm.tracing.tap import TapUnavailable
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.comm.tracing.unknown import describe_unknown


class Recorder:
    """Collects events by the number of their call.

    Times are seconds since ``origin`` (``time.monotonic_ns``).
    """

    def __init__(self, rank: int, origin: int) -> None:
        self.rank, self.origin = rank, origin
        self.events: dict[int, Event] = {}
        self.clock = CompletionClock(self._done)
        self._queued: set[int] = set()
        """Calls that a GPU stream runs: the end of their wait does not show their end."""

    def issued(self, call: Call) -> None:
        """Add an event for the call."""
        if call.kind is Kind.UNKNOWN:
            _warn_once(f"{describe_unknown(call.operator)}: its calls are traced without kind and bytes")
        self.events[call.number] = Event(self.rank, call, self._seconds(call.issued))

    def running(self, call: Call, work: Work, on_device: bool) -> None:
        """Measure when the call ends, if it is asynchronous or runs on a GPU."""
        if on_device:
            self._queued.add(call.number)
        if on_device or call.is_async:
            self.clock.start(call, work, on_device)

    def waits(self, call: Call) -> None:
        """Record the start of the wait for the call."""
        if (event := self.events.get(call.number)) is not None and event.waited_from is None:
            event.waited_from = self._seconds(time.monotonic_ns())

    def waited(self, call: Call, failed: bool) -> None:
        """Record the end of the wait for the call."""
        if (event := self.events.get(call.number)) is not None and not failed:
            event.waited_until = self._seconds(time.monotonic_ns())
            # The backend's thread wakes the waiting thread before it records the time: the call is over by
            # now.
            if (
                call.number not in self._queued
                and not (call.is_async and call.kind.point_to_point)
                and event.done is None
            ):
                event.done = event.waited_until

    def _done(self, number: int, moment: int) -> None:
        event, done = self.events[number], self._seconds(moment)
        event.done = done if event.done is None else min(event.done, done)

    def _seconds(self, moment: int) -> float:
        return (moment - self.origin) / 1e9


@contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Within this context, fill ``trace`` with the communication of this process."""
    recorder = Recorder(dist.get_rank(), time.monotonic_ns())
    with ExitStack() as stack:
        try:
            stack.enter_context(listening(recorder))
        except TapUnavailable as error:
            trace.unavailable = str(error)
            _warn_once(f"communication is not traced: {error}")
        try:
            yield
        finally:
            recorder.clock.stop()
            trace.began = recorder.origin
            trace.events = list(recorder.events.values())
            trace.seconds = (time.monotonic_ns() - recorder.origin) / 1e9
            trace.spans = {recorder.rank: (0.0, trace.seconds)}


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextmanager
def trace_collectives() -> Iterator[Trace]:
    """Trace the communication of this process within the context; read the trace afterwards.

    The process must have a process group. The trace contains all calls that pass torch's dispatcher. It does
    not contain calls on a backend object, the key-value store, symmetric memory and other processes
    (``comm.tracing.tap``). If the tap does not know the internals of this version of torch, the program runs
    with a warning, ``unavailable`` gives the reason, and questions raise ``NotTraced``.
    """
    trace = Trace()
    with recording(trace):
        yield trace
