"""When the backend finishes a call, which differs from when the program waits for it.

gloo ends an asynchronous collective on a thread of gloo, which then runs the callbacks of the work's future;
here the callback records the time. It needs the GIL, so gloo's thread is delayed while another thread holds
it: at most 5 ms in pure Python, or the whole duration of a C call that does not release it. NCCL completes a
future once the kernel is queued, and runs callbacks in a stream that waits for the kernel: an event recorded
there measures the time on the GPU.

The end of point-to-point messages (gloo gives them no future) and of work captured into a CUDA graph is not
known. Cost: about 40 microseconds of CPU time for each asynchronous collective.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import Work

from dlo_lib.comm.calls import Call

_get_future = Work.get_future  # the original method, because the tracer replaces it while it watches waits
_LOOK_AGAIN_S = 0.01


class CompletionClock:
    """Measures when calls end.

    ``stop`` passes each to ``noted(number, moment)``, in ``time.monotonic_ns``.
    """

    def __init__(self, noted: Callable[[int, int], None]) -> None:
        self._noted = noted
        self._over: list[tuple[int, int]] = []
        self._callbacks: list[weakref.ref[Callable[[object], None]]] = []
        self._on_device: list[tuple[int, torch.cuda.Event]] = []
        self._origin: tuple[torch.cuda.Event, int] | None = None
        atexit.register(self._let_finish)

    def start(self, call: Call, work: Work, on_device: bool) -> None:
        """Record when ``work`` ends. ``on_device``: it runs in a stream, and its future completes earlier."""
        if call.kind.point_to_point or (on_device and torch.cuda.is_current_stream_capturing()):
            return
        if on_device and self._origin is None:
            self._origin = _event_now()
        ended, number = self._over, call.number

        def over(_: object) -> None:
            if on_device:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._on_device.append((number, event))
            else:
                # Do no more here, because the backend needs its thread.
                ended.append((number, time.monotonic_ns()))

        try:
            _get_future(work).add_done_callback(over)
        except RuntimeError:  # this work has no future
            return
        self._callbacks.append(weakref.ref(over))

    def stop(self) -> None:
        """Report the ends that are known by now; ends of calls that still run are not reported."""
        for number, moment in self._over:
            self._noted(number, moment)
        if self._origin is not None:
            torch.cuda.synchronize()
            event_then, then = self._origin
            for number, event in self._on_device:
                self._noted(number, then + int(event_then.elapsed_time(event) * 1e6))
        if not self._runs():
            atexit.unregister(self._let_finish)

    def _runs(self) -> bool:
        """Return whether a call runs, or gloo's thread is still in its callback.

        gloo drops the callback as the last thing that it does with the GIL. The callback itself must not
        report its end: after it, gloo's thread asks for the GIL once more.
        """
        self._callbacks = [callback for callback in self._callbacks if callback() is not None]
        return bool(self._callbacks)

    def _let_finish(self) -> None:
        """Wait for running work at exit.

        gloo waits for it later, while Python shuts down; a thread that asks for the GIL then ends the process
        with SIGABRT.
        """
        while self._runs() and dist.is_initialized():
            time.sleep(_LOOK_AGAIN_S)


def _event_now() -> tuple[torch.cuda.Event, int]:
    """Return an event of the device and the time at which it was reached."""
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event, time.monotonic_ns()
