"""Learning-rate schedules as pure functions from the number of completed steps to a factor of the peak
learning rate.

A schedule is a callable frozen dataclass,  lr = peak * schedule(step),  with step = 0 for the first step, as
in PyTorch. It has no state, so resuming, drawing and comparing need only the step. ``WarmUp`` can precede any
schedule. OneCycle and the cyclical schedules also have a momentum, which falls while the learning rate rises.
``adapter.ScheduleLR`` turns a schedule into a PyTorch scheduler.

Papers: cyclical, Smith (arXiv:1506.01186); OneCycle, Smith and Topin (arXiv:1708.07120); cosine with
restarts, Loshchilov and Hutter (arXiv:1608.03983); warm-up, Goyal et al. (arXiv:1706.02677); warm-up - stable
- decay, Hu et al. (arXiv:2404.06395), whose decay as 1 - sqrt is from Hägele et al. (arXiv:2405.18392)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dlo_lib.base.errors import UserError


class LRSchedule(Protocol):
    """A function from the number of completed steps, starting at 0, to a factor of the peak learning rate."""

    def __call__(self, step: int) -> float: ...


@runtime_checkable
class MomentumSchedule(LRSchedule, Protocol):
    """A schedule that also has a momentum (beta 1 of Adam) for each step."""

    def momentum(self, step: int) -> float: ...


class CurveShape(enum.Enum):
    """The shape of the transition from one value to another."""

    LINEAR = "linear"
    COSINE = "cosine"
    ONE_MINUS_SQRT = "1-sqrt"

    def between(self, start: float, end: float, progress: float) -> float:
        """Interpolate: ``start`` at progress 0, ``end`` at progress 1."""
        left = {
            CurveShape.LINEAR: lambda p: 1 - p,
            CurveShape.COSINE: lambda p: (1 + math.cos(math.pi * p)) / 2,
            CurveShape.ONE_MINUS_SQRT: lambda p: 1 - math.sqrt(p),
        }[self](progress)
        return end + (start - end) * left


@dataclass(frozen=True)
class Constant:
    """A constant factor of 1."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmUp:
    """A linear rise from 0 over ``steps`` steps, followed by ``then``.

    The first step has factor 0, as in transformers.
    """

    steps: int
    then: LRSchedule

    def __post_init__(self) -> None:
        _at_least("warm-up steps", self.steps, 0)

    def __call__(self, step: int) -> float:
        return step / self.steps if step < self.steps else self.then(step - self.steps)


@dataclass(frozen=True)
class Step:
    """Multiply the factor by ``gamma`` after every ``every`` steps (StepLR)."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _at_least("every", self.every, 1)

    def __call__(self, step: int) -> float:
        return self.gamma ** (step // self.every)


@dataclass(frozen=True)
class Exponential:
    """Multiply the factor by ``gamma`` after every step (ExponentialLR)."""

    gamma: float

    def __call__(self, step: int) -> float:
        return self.gamma**step


@dataclass(frozen=True)
class Polynomial:
    """Decay from 1 to ``final`` as (1 - step / steps) ** power, then stay at ``final``.

    Power 1 is a linear decay.
    """

    steps: int
    power: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        left = 1 - min(step, self.steps) / self.steps
        return self.final + (1 - self.final) * left**self.power


@dataclass(frozen=True)
class Linear(Polynomial):
    """Decay linearly from 1 to ``final``, then stay at ``final``."""

    power: float = 1.0


@dataclass(frozen=True)
class Cosine:
    """Decay from 1 to ``final`` along half a cosine over ``steps`` steps, then stay at ``final``.

    CosineAnnealingLR has the same values up to ``steps`` and then rises again.
    """

    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        return CurveShape.COSINE.between(1.0, self.final, min(step, self.steps) / self.steps)


@dataclass(frozen=True)
class CosineRestarts:
    """Repeat half a cosine from 1 to ``final``.

    The first cycle has ``period`` steps, each further one ``growth`` times more.

    With growth 1 and period ceil(T / M) it is the schedule of M snapshots in T steps (``SnapshotEnsemble``).
    """

    period: int
    growth: int = 1
    final: float = 0.0

    def __post_init__(self) -> None:
        _at_least("period", self.period, 1)
        _at_least("growth", self.growth, 1)

    def __call__(self, step: int) -> float:
        length = self.period
        while step >= length:
            step -= length
            length *= self.growth
            if self.growth == 1:
                step %= length
        return CurveShape.COSINE.between(1.0, self.final, step / length)


@dataclass(frozen=True)
class WarmUpStableDecay:
    """Rise linearly from ``lowest`` to 1, stay there, and fall to ``lowest`` in the given shape.

    The length of the plateau need not be fixed in advance: a checkpoint from the plateau can be decayed or
    trained further."""

    warmup: int
    stable: int
    decay: int
    lowest: float = 0.0
    shape: CurveShape = CurveShape.ONE_MINUS_SQRT

    def __post_init__(self) -> None:
        for name in ("warmup", "stable", "decay"):
            _at_least(name, getattr(self, name), 0)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return CurveShape.LINEAR.between(self.lowest, 1.0, step / self.warmup)
        falling = step - self.warmup - self.stable
        if falling < 0:
            return 1.0
        return (
            self.shape.between(1.0, self.lowest, falling / self.decay)
            if falling < self.decay
            else self.lowest
        )


@dataclass(frozen=True)
class OneCycle:
    """Rise once from ``start`` to 1 and fall once to ``final`` (OneCycleLR).

    High learning rates regularise; the low ones at the end converge. The momentum moves in the opposite
    direction: it falls from ``most_momentum`` to ``least_momentum`` and rises back. The last of the ``steps``
    steps and all later ones have the factor ``final``.

    Args:
        rise: the fraction of the steps in which the factor rises.
    """

    steps: int
    rise: float = 0.3
    start: float = 1 / 25
    final: float = 1 / 25e4
    shape: CurveShape = CurveShape.COSINE
    least_momentum: float = 0.85
    most_momentum: float = 0.95

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 2)
        if not 1 < self.rise * self.steps < self.steps:
            raise UserError(
                f"rise is {self.rise} of {self.steps} steps: use more than one step and fewer than all steps"
            )

    def __call__(self, step: int) -> float:
        return self._phase(step, self.start, 1.0, self.final)

    def momentum(self, step: int) -> float:
        """Of the same step."""
        return self._phase(step, self.most_momentum, self.least_momentum, self.most_momentum)

    def _phase(self, step: int, start: float, top: float, end: float) -> float:
        peak, last = self.rise * self.steps - 1, self.steps - 1  # the peak may lie between two steps
        if step <= peak:
            return self.shape.between(start, top, step / peak)
        return self.shape.between(top, end, (min(step, last) - peak) / (last - peak))


@dataclass(frozen=True)
class Triangular:
    """Rise from ``lowest`` to 1 in ``rise`` steps and fall back in ``fall`` steps, periodically (CyclicLR).

    If ``fall`` is None, it equals ``rise``. The momentum moves in the opposite direction, between
    ``most_momentum`` and ``least_momentum``."""

    rise: int
    lowest: float
    fall: int | None = None
    least_momentum: float = 0.8
    most_momentum: float = 0.9

    def __post_init__(self) -> None:
        _at_least("rise", self.rise, 1)
        _at_least("fall", self._fall, 1)

    def __call__(self, step: int) -> float:
        return self.lowest + (1 - self.lowest) * self._up(step)

    def momentum(self, step: int) -> float:
        """Of the same step."""
        return self.most_momentum - (self.most_momentum - self.least_momentum) * self._up(step)

    @property
    def _fall(self) -> int:
        return self.rise if self.fall is None else self.fall

    def _up(self, step: int) -> float:
        cycle, place = divmod(step, self.rise + self._fall)
        up = place / self.rise if place <= self.rise else (self.rise + self._fall - place) / self._fall
        return up * self._height(cycle, step)

    def _height(self, cycle: int, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Triangular2(Triangular):
    """A triangular schedule in which each triangle is half as high as the previous one."""

    def _height(self, cycle: int, step: int) -> float:
        return 0.5**cycle


@dataclass(frozen=True)
class ExpRange(Triangular):
    """A triangular schedule whose height is ``gamma ** step``."""

    gamma: float = 0.999

    def _height(self, cycle: int, step: int) -> float:
        return self.gamma**step


class ScheduleName(enum.Enum):
    """The schedules that a run with a known number of steps can choose by name."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"

    def over(self, steps: int, warmup: int) -> LRSchedule:
        """Create the schedule of ``steps`` steps, of which the first ``warmup`` rise.

        WSD decays in the last fifth of the steps, or in all steps after the warm-up if these are fewer.

        Raises:
            UserError: the warm-up takes all steps.
        """
        if self is ScheduleName.CONSTANT:
            return WarmUp(warmup, Constant())
        left = steps - warmup
        if left < 1:
            raise UserError(
                f"warmup takes {warmup} of {steps} steps: leave some to the {self.value} schedule"
            )
        if self is ScheduleName.WSD:
            decay = min(left, max(1, round(steps / 5)))
            return WarmUpStableDecay(warmup, left - decay, decay)
        return WarmUp(warmup, Linear(left) if self is ScheduleName.LINEAR else Cosine(left))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} is {value}: use at least {least}")
