"""A chronometer with named phases: how long each part of a step takes, measured after the device has
finished it.

A GPU works asynchronously: a call returns when its work is in the queue. A clock that is read then measures
the queue, and attributes the work to a later call that waits. Therefore the device is synchronised at both
ends of each phase. That removes the overlap between CPU and GPU: the sum of the phases may exceed the time
of a step that is not measured, which the chronometer can also measure (``synchronise=False`` measures whole
steps only).

The first steps are slower, because they allocate memory and choose kernels. The summary leaves them out,
and gives the median and the quartiles of the others, because single steps of a shared machine may take much
longer.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dlo_lib.base.errors import UserError


@dataclass(frozen=True)
class PhaseTime:
    """The seconds of one phase in a step.

    Attributes:
        median, low, high: the median and the quartiles over the steps.
        share: the median divided by the median of the whole step.
    """

    median: float
    low: float
    high: float
    share: float


class Chronometer:
    """Measure the phases of steps::

        chronometer = Chronometer(device)
        for batch in loader:
            with chronometer.step(samples=len(batch)):
                with chronometer.phase("forward"):
                    loss = model(batch)

    A phase may occur several times in a step; its times are added. Phases do not overlap.

    Args:
        device: the device to wait for.
        synchronise: whether to wait for the device at the ends of phases; if not, only at the ends of
        steps, and
            phases are not recorded.
        clock: returns the present time in seconds.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        synchronise: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = torch.device(device)
        self._synchronise, self._clock = synchronise, clock
        self._steps: list[float] = []
        self._samples: list[int] = []
        self._phases: list[dict[str, float]] = []  # for each step
        self._inside: str | None = None  # "" within a step, the name of the phase within a phase

    @contextlib.contextmanager
    def step(self, samples: int = 1) -> Iterator[None]:
        """Measure one step, which processes ``samples`` samples. A step that raises is not recorded.

        Raises:
            UserError: the step is within another one.
        """
        if self._inside is not None:
            raise UserError("a step within a step: leave the first one before the next begins")
        self._inside = ""
        self._phases.append({})
        begin = self._now()
        try:
            yield
        except BaseException:
            self._phases.pop()
            raise
        else:
            self._steps.append(self._now() - begin)
            self._samples.append(samples)
        finally:
            self._inside = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of the present step.

        Raises:
            UserError: there is no step, or the phase is within another one.
        """
        if self._inside is None:
            raise UserError(f"the phase {name!r} is outside a step: put it into `with chronometer.step():`")
        if self._inside:
            raise UserError(f"the phase {name!r} is within {self._inside!r}: phases do not overlap")
        if not self._synchronise:
            yield
            return
        self._inside = name
        begin = self._now()
        try:
            yield
        finally:
            self._inside = ""
        phases = self._phases[-1]
        phases[name] = phases.get(name, 0.0) + self._now() - begin

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()

    def step_time(self, skip: int = 2) -> PhaseTime:
        """Return the time of a step, without the first ``skip`` steps."""
        return _summary(self._measured(self._steps, skip), None)

    def phases(self, skip: int = 2) -> dict[str, PhaseTime]:
        """Return the time of each phase in the order of its first occurrence, and of what lies between
        phases.

        Raises:
            UserError: no step was measured after the first ``skip``.
        """
        steps, phases = self._measured(self._steps, skip), self._phases[skip:]
        whole = statistics.median(steps)
        names = list(dict.fromkeys(name for step in phases for name in step))
        found = {name: _summary([step.get(name, 0.0) for step in phases], whole) for name in names}
        rest = [seconds - sum(step.values()) for seconds, step in zip(steps, phases, strict=True)]
        return {**found, "other": _summary(rest, whole)} if names else {}

    def throughput(self, skip: int = 2) -> float:
        """Return the samples per second of all steps after the first ``skip``."""
        return sum(self._samples[skip:]) / sum(self._measured(self._steps, skip))

    @staticmethod
    def _measured(steps: list[float], skip: int) -> list[float]:
        if len(steps) <= skip:
            raise UserError(f"{len(steps)} steps were measured, of which {skip} are left out: measure more")
        return steps[skip:]


def _summary(seconds: list[float], whole: float | None) -> PhaseTime:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return PhaseTime(median, low, high, median / whole if whole else 1.0)
