"""When the backend has finished a call, which is not when somebody has waited for it.

An asynchronous collective of gloo ends on a thread of gloo's, which then runs what hangs on the future of its work: here a function that
notes the time. It needs the GIL, so gloo's thread stands still while another thread keeps that: 5 ms of pure Python at the most, as long as
it takes in a C call that does not give it up. NCCL's futures are complete once the kernel is queued, and what hangs on them runs in a
stream that waits for it: an event recorded there tells the time on the GPU.

Not known are messages (gloo's have no future) and what is captured into a CUDA graph. Cost: some 40 microseconds of CPU time for each
asynchronous collective.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import Work

from dlo_lib.comm.calls import Call

_get_future = Work.get_future  # torch's own, also while the waits of futures are watched
_LOOK_AGAIN_S = 0.01


class CompletionClock:
    """Tells ``noted(number, moment)``, when it is stopped, when the call of that number was over, in ``time.monotonic_ns``."""

    def __init__(self, noted: Callable[[int, int], None]) -> None:
        self._noted = noted
        self._over: list[tuple[int, int]] = []
        self._running: dict[int, Work] = {}
        self._on_device: list[tuple[int, torch.cuda.Event]] = []
        self._origin: tuple[torch.cuda.Event, int] | None = None
        atexit.register(self._let_finish)

    def start(self, call: Call, work: Work, on_device: bool) -> None:
        """Note when ``work`` is over; ``on_device``: it runs in a stream, and its future is complete before."""
        if call.kind.point_to_point or (on_device and torch.cuda.is_current_stream_capturing()):
            return
        if on_device and self._origin is None:
            self._origin = _event_now()
        running, ended, number = self._running, self._over, call.number

        def over(_: object) -> None:
            if on_device:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._on_device.append((number, event))
            else:
                ended.append((number, time.monotonic_ns()))  # no more than that: the backend's thread has other work
            running.pop(number, None)

        running[number] = work
        try:
            _get_future(work).add_done_callback(over)
        except RuntimeError:  # a work without a future
            running.pop(number)

    def stop(self) -> None:
        """Tell what is known by now; of calls that are over later nobody is told."""
        for number, moment in self._over:
            self._noted(number, moment)
        if self._origin is not None:
            torch.cuda.synchronize()
            event_then, then = self._origin
            for number, event in self._on_device:
                self._noted(number, then + int(event_then.elapsed_time(event) * 1e6))
        if not self._running:
            atexit.unregister(self._let_finish)

    def _let_finish(self) -> None:
        """At the end of the process gloo waits for what still runs, but later, when Python is being torn down: a thread that then asks for
        the GIL ends the process with SIGABRT. So wait before."""
        while self._running and dist.is_initialized():
            time.sleep(_LOOK_AGAIN_S)


def _event_now() -> tuple[torch.cuda.Event, int]:
    """An event of the device and the moment at which it was reached."""
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event, time.monotonic_ns()
