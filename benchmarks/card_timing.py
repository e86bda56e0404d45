"""Times operations on a GPU with CUDA events, forward and backward apart.

Before each measured phase the L2 cache is overwritten and the GPU sleeps while the CPU enqueues the work, so
that the time between the two events has no gap in which the GPU waits for Python. What Python costs is
measured apart, as the time of calls that are enqueued one after the other without a synchronisation, and so
is the time of a call in such a loop, the larger of the two for most operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

FLUSHED = 256 << 20
"""Bytes that are written before each measured phase: several times the L2 cache."""
COPIED = 1 << 30
"""Bytes of the copy whose rate is the limit of the memory-bound operations."""
PRODUCT = 8192
"""Rows and columns of the product whose rate is the limit of the others."""
CYCLES_PER_MICROSECOND = 2000
"""Of a GPU, about: how long it sleeps need not be exact."""


@dataclass(frozen=True)
class Timing:
    """The cost of one call with its backward.

    Attributes:
        forward_ms, backward_ms: on the GPU, medians. backward_ms is 0 without a backward.
        cpu_us: of Python and the launches, forward and backward.
        loop_us: of a call in a loop, forward and backward.
        peak_mib: memory above the inputs and the incoming gradient.
    """

    forward_ms: float
    backward_ms: float
    cpu_us: float
    loop_us: float
    peak_mib: float


class Meter:
    """Measures on one device. On a CPU, times are wall times: only a GPU gives figures worth reading.

    Args:
        device: of the inputs.
        milliseconds: about how long the repetitions of one measurement take.
    """

    def __init__(self, device: torch.device, milliseconds: float = 80.0) -> None:
        self.device, self.milliseconds = device, milliseconds
        self.on_gpu = device.type == "cuda"

    @cached_property
    def _flushed(self) -> Tensor:
        return torch.empty(FLUSHED, dtype=torch.int8, device=self.device)

    @cached_property
    def copied_per_second(self) -> float:
        """The bytes per second, read and written, of a copy of 1 GiB."""
        source = torch.empty(COPIED if self.on_gpu else 1 << 20, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    @cached_property
    def multiplied_per_second(self) -> float:
        """The floating-point operations per second of a product of two bf16 matrices."""
        n = PRODUCT if self.on_gpu else 64
        left, right = (torch.randn(n, n, device=self.device).bfloat16() for _ in range(2))
        return 2 * n**3 / self._seconds(lambda: left @ right)

    def time(
        self,
        action: Callable[..., Any],
        inputs: Sequence[Tensor],
        grad: Tensor | None,
        copied: bool = False,
    ) -> Timing:
        """Time ``action(*inputs)`` and, with ``grad``, its backward.

        Args:
            copied: whether the inputs are copied before each repetition, because ``action`` writes over them.
        """

        def fresh() -> list[Tensor]:
            return [x.detach().clone().requires_grad_() for x in inputs] if copied else list(inputs)

        def once() -> None:
            used = fresh()
            out = action(*used)
            if grad is not None:
                torch.autograd.grad(out, used, grad)

        for _ in range(3):
            once()
        peak_mib = self._peak(once)
        cpu_us, loop_us = self._in_a_loop(once)
        forward: list[float] = []
        backward: list[float] = []
        repetitions = 3
        while len(forward) < repetitions:
            used = fresh()
            out, milliseconds = self._phase(partial(action, *used), cpu_us)
            forward.append(milliseconds)
            if grad is not None:
                _, milliseconds = self._phase(partial(torch.autograd.grad, out, used, grad), cpu_us)
                backward.append(milliseconds)
            del out, used
            if len(forward) == 3:
                total = statistics.median(forward) + (statistics.median(backward) if backward else 0)
                repetitions = min(25, max(5, int(self.milliseconds / (total + 0.3))))
        return Timing(
            statistics.median(forward),
            statistics.median(backward) if backward else 0.0,
            cpu_us,
            loop_us,
            peak_mib,
        )

    def _phase(self, action: Callable[[], Any], cpu_us: float) -> tuple[Any, float]:
        """Run ``action`` with a cold cache; return its result and its milliseconds."""
        if not self.on_gpu:
            began = time.perf_counter()
            return action(), 1e3 * (time.perf_counter() - began)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        torch.cuda._sleep(int(CYCLES_PER_MICROSECOND * min(3000.0, 100 + 2 * cpu_us)))
        start.record()
        result = action()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end)

    def _seconds(self, action: Callable[[], object]) -> float:
        """Return the median time of ``action`` on the GPU."""
        for _ in range(3):
            action()
        return statistics.median(self._phase(action, 0)[1] for _ in range(9)) / 1e3

    def _in_a_loop(self, action: Callable[[], None], calls: int = 10) -> tuple[float, float]:
        """Return the microseconds of a call until it is enqueued, and until it is complete."""
        enqueued, complete = [], []
        for _ in range(3):
            self._finish()
            began = time.perf_counter()
            for _ in range(calls):
                action()
            enqueued.append(time.perf_counter() - began)
            self._finish()
            complete.append(time.perf_counter() - began)
        return 1e6 * statistics.median(enqueued) / calls, 1e6 * statistics.median(complete) / calls

    def _peak(self, action: Callable[[], None]) -> float:
        if not self.on_gpu:
            action()
            return 0.0
        self._finish()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        action()
        self._finish()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def _finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
