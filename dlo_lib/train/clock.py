"""Measure the parts of one step on this rank: reading, forward, backward, optimiser and waiting for other
ranks.

The step is divided at the starts of its phases. The waits for collectives within a phase, taken from the
trace of this rank, are subtracted from the phase and summed separately, so no second counts twice. On a GPU,
the boundaries are events on its stream. The process does not know the waits of the GPU, so they stay in their
phases.

Cost: a trace and a few clock readings in each measured step, which is a step with a line of metrics.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.optim.step import Phase


@dataclass(frozen=True)
class StepSplit:
    """Seconds of one step.

    ``communication`` is the time of waiting; None on a GPU, where the other parts include it.
    """

    load: float
    forward: float
    backward: float
    optimizer: float
    communication: float | None


class NoClock(contextlib.AbstractContextManager["NoClock"]):
    """A clock for a step that is not measured."""

    def __exit__(self, *error: object) -> None:
        return None

    def on_phase(self, phase: Phase) -> None:
        """Pass this method to ``train_step``."""


_PARTS = {Phase.LOSS: Phase.FORWARD, Phase.CLIP: Phase.OPTIMIZER}
"""Phases that count as part of another phase."""


class StepClock(NoClock):
    """A context around reading the data of a step and ``train_step``; call ``split`` afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuts: list[tuple[Phase | None, int | torch.cuda.Event]] = []  # phase and start; None: reading
        self._stack = contextlib.ExitStack()
        self._trace: Trace | None = None

    def __enter__(self) -> StepClock:
        if self._device.type != "cuda" and dist.is_initialized():
            self._trace = self._stack.enter_context(trace_collectives())
        self._cut(None)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    def on_phase(self, phase: Phase) -> None:
        self._cut(_PARTS.get(phase, phase))

    def _cut(self, begins: Phase | None) -> None:
        if self._device.type != "cuda":
            self._cuts.append((begins, time.monotonic_ns()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._cuts.append((begins, event))

    def split(self) -> StepSplit | None:
        """Return the parts; None for a pipeline, whose forwards and backwards alternate.

        On a GPU, the step must have completed.
        """
        seen = [begins for begins, _ in self._cuts]
        if Phase.BACKWARD not in seen or seen[-1] is not Phase.END:
            return None
        seconds: dict[Phase | None, float] = dict.fromkeys(
            (None, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), 0.0
        )
        stood_still = 0.0
        for (part, begin), (_, end) in zip(self._cuts, self._cuts[1:]):
            if isinstance(begin, int) and isinstance(end, int):
                waited = self._waited(begin, end)
                stood_still += waited
                seconds[part] += (end - begin) / 1e9 - waited
            elif isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                seconds[part] += begin.elapsed_time(end) / 1e3
        parts = (seconds[None], seconds[Phase.FORWARD], seconds[Phase.BACKWARD], seconds[Phase.OPTIMIZER])
        return StepSplit(*parts, communication=None if self._device.type == "cuda" else stood_still)

    def _waited(self, begin: int, end: int) -> float:
        """Return the seconds of the interval in which the process waited; simultaneous waits count once."""
        if self._trace is None or self._trace.unavailable:
            return 0.0
        origin = self._trace.began
        waits = sorted(
            (max(begin, origin + event.waited_from * 1e9), min(end, origin + event.waited_until * 1e9))
            for event in self._trace.events
            if event.waited_from is not None and event.waited_until is not None
        )
        total, until = 0.0, float(begin)
        for first, last in waits:
            total += max(0.0, last - max(first, until))
            until = max(until, last)
        return total / 1e9
