"""Learning-rate schedules as pure functions: the number of steps done so far goes in, a factor of the peak learning rate comes out.

A schedule is a frozen dataclass that is called,  lr = peak * schedule(step)  with step = 0 for the first step, as in PyTorch. It holds no
state: resuming, drawing and comparing need nothing but the step. ``WarmUp`` goes before any of them; OneCycle and the cyclical ones also
say a momentum, which falls where the learning rate rises. ``adapter.ScheduleLR`` makes each a torch scheduler; cost: nothing.

Papers: cyclical, Smith (arXiv:1506.01186); OneCycle, Smith and Topin (arXiv:1708.07120); cosine with restarts, Loshchilov and Hutter
(arXiv:1608.03983); warm-up, Goyal et al. (arXiv:1706.02677); warm-up - stable - decay, Hu et al. (arXiv:2404.06395), whose decay as
1 - sqrt is from Hägele et al. (arXiv:2405.18392).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dlo_lib.errors import UserError


class Schedule(Protocol):
    """The number of steps already done, from 0, to a factor of the peak learning rate."""

    def __call__(self, step: int) -> float: ...


@runtime_checkable
class MomentumSchedule(Schedule, Protocol):
    """A schedule that also says the momentum (beta 1 of Adam) of each step."""

    def momentum(self, step: int) -> float: ...


class Shape(enum.Enum):
    """How a phase goes from one value to another."""

    LINEAR = "linear"
    COSINE = "cosine"
    ONE_MINUS_SQRT = "1-sqrt"

    def between(self, start: float, end: float, progress: float) -> float:
        """``start`` at progress 0, ``end`` at 1."""
        left = {
            Shape.LINEAR: lambda p: 1 - p,
            Shape.COSINE: lambda p: (1 + math.cos(math.pi * p)) / 2,
            Shape.ONE_MINUS_SQRT: lambda p: 1 - math.sqrt(p),
        }[self](progress)
        return end + (start - end) * left


@dataclass(frozen=True)
class Constant:
    """1 for ever."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmUp:
    """A linear rise from 0 over ``steps`` steps, then ``then`` from its beginning. (The first step has factor 0, as in transformers.)"""

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        _at_least("warm-up steps", self.steps, 0)

    def __call__(self, step: int) -> float:
        return step / self.steps if step < self.steps else self.then(step - self.steps)


@dataclass(frozen=True)
class Step:
    """Times ``gamma`` after each ``every`` steps (StepLR)."""

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _at_least("every", self.every, 1)

    def __call__(self, step: int) -> float:
        return self.gamma ** (step // self.every)


@dataclass(frozen=True)
class Exponential:
    """Times ``gamma`` after each step (ExponentialLR)."""

    gamma: float

    def __call__(self, step: int) -> float:
        return self.gamma**step


@dataclass(frozen=True)
class Polynomial:
    """From 1 to ``final`` as (1 - step / steps) ** power, then ``final``; power 1 is linear decay."""

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
    """From 1 to ``final`` in a straight line, then ``final``."""

    power: float = 1.0


@dataclass(frozen=True)
class Cosine:
    """From 1 to ``final`` along half a cosine over ``steps`` steps, then ``final`` (CosineAnnealingLR, which would rise again)."""

    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)

    def __call__(self, step: int) -> float:
        return Shape.COSINE.between(1.0, self.final, min(step, self.steps) / self.steps)


@dataclass(frozen=True)
class CosineRestarts:
    """Half a cosine from 1 to ``final``, again and again; each cycle is ``growth`` times as long as the one before, the first ``period``.

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
        return Shape.COSINE.between(1.0, self.final, step / length)


@dataclass(frozen=True)
class WarmUpStableDecay:
    """A linear rise from ``lowest`` to 1, a plateau, and a fall to ``lowest`` in the given shape.

    The plateau may be as long as one likes: a checkpoint on it can be decayed, or trained further, whatever was planned.
    """

    warmup: int
    stable: int
    decay: int
    lowest: float = 0.0
    shape: Shape = Shape.ONE_MINUS_SQRT

    def __post_init__(self) -> None:
        for name in ("warmup", "stable", "decay"):
            _at_least(name, getattr(self, name), 0)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return Shape.LINEAR.between(self.lowest, 1.0, step / self.warmup)
        falling = step - self.warmup - self.stable
        if falling < 0:
            return 1.0
        return self.shape.between(1.0, self.lowest, falling / self.decay) if falling < self.decay else self.lowest


@dataclass(frozen=True)
class OneCycle:
    """One rise from ``start`` to 1 and one fall to ``final`` (OneCycleLR): high learning rates regularise, the end converges.

    The momentum does the contrary: it falls from ``most_momentum`` to ``least_momentum`` and comes back. The last of the ``steps`` has
    ``final``, and so has every later one.

    Args:
        rise: share of the steps that rise.
    """

    steps: int
    rise: float = 0.3
    start: float = 1 / 25
    final: float = 1 / 25e4
    shape: Shape = Shape.COSINE
    least_momentum: float = 0.85
    most_momentum: float = 0.95

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 2)
        if not 1 < self.rise * self.steps < self.steps:
            raise UserError(f"rise is {self.rise} of {self.steps} steps: let it be more than one step, and not all of them")

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
    """From ``lowest`` to 1 in ``rise`` steps and back in ``fall`` (as many when None), for ever (CyclicLR).

    The momentum does the contrary, between ``most_momentum`` and ``least_momentum``.
    """

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
    """Each triangle is half as high as the one before."""

    def _height(self, cycle: int, step: int) -> float:
        return 0.5**cycle


@dataclass(frozen=True)
class ExpRange(Triangular):
    """The height is ``gamma ** step``."""

    gamma: float = 0.999

    def _height(self, cycle: int, step: int) -> float:
        return self.gamma**step


class Course(enum.Enum):
    """Schedules by name, for a run whose number of steps is known."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"

    def over(self, steps: int, warmup: int) -> Schedule:
        """The schedule of ``steps`` steps, of which ``warmup`` rise; WSD falls in the last fifth, or in what the warm-up leaves of it.

        Raises:
            UserError: the warm-up leaves nothing.
        """
        if self is Course.CONSTANT:
            return WarmUp(warmup, Constant())
        left = steps - warmup
        if left < 1:
            raise UserError(f"warmup takes {warmup} of {steps} steps: leave some to the {self.value} schedule")
        if self is Course.WSD:
            decay = min(left, max(1, round(steps / 5)))
            return WarmUpStableDecay(warmup, left - decay, decay)
        return WarmUp(warmup, Linear(left) if self is Course.LINEAR else Cosine(left))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} is {value}: use at least {least}")
