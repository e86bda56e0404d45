"""Where the time of one step goes on this rank: reading, forward, backward, optimiser, and standing still for other ranks.

A step is cut where its phases begin. The waits for collectives that fall into a phase (from the trace of the rank's own communication) are
taken out of it and added up beside it, so the parts never count a second twice. On a GPU the cuts are events on its stream, and what is
waited for there is not known to the process: it stays in the phase that waits.

Cost: a trace and a few clock readings, for the steps that are looked at; these are the steps for which a line of metrics is due.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlo_lib.comm.trace import Trace, trace_collectives
from dlo_lib.optim.step import Phase


@dataclass(frozen=True)
class StepSplit:
    """Seconds of one step. communication: the process stood still for other ranks; None on a GPU, where it is part of the others."""

    load: float
    forward: float
    backward: float
    optimizer: float
    communication: float | None


class NoClock(contextlib.AbstractContextManager["NoClock"]):
    """A step that nobody looks at."""

    def __exit__(self, *error: object) -> None:
        return None

    def on_phase(self, phase: Phase) -> None:
        """To be given to ``train_step``."""


_PARTS = {Phase.LOSS: Phase.FORWARD, Phase.CLIP: Phase.OPTIMIZER}
"""Phases that count as another."""


class StepClock(NoClock):
    """A context around the reading of a step's data and ``train_step``; ``split`` afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuts: list[tuple[Phase | None, int | torch.cuda.Event]] = []  # what begins, and when; None: reading
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
        """The parts; None for a pipeline, whose forwards and backwards alternate. On a GPU the step must be over."""
        seen = [begins for begins, _ in self._cuts]
        if Phase.BACKWARD not in seen or seen[-1] is not Phase.END:
            return None
        seconds: dict[Phase | None, float] = dict.fromkeys((None, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), 0.0)
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
        """Seconds of the interval in which the process stood still; waits of several calls at once count once."""
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
