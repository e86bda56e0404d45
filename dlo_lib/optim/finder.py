"""The learning-rate range test: train a few steps while the learning rate grows exponentially, and watch where the loss falls and breaks.

At step i of n the learning rate is  lr_i = lowest * (highest / lowest) ** (i / (n - 1));  the test ends where the smoothed loss is worse
than at first and ``BREAKS`` times its best. With a reset, every learning rate starts from the same weights instead and learns from the same
batches: dearer by their number, but what one has done does not weigh on the next. All is left as it was, random states included.

Under data parallelism every rank calls it with its own batches: losses are averaged, so that all ranks see one curve and stop together; one
number is sent a step. Cost: the steps, and a copy of model and optimiser state.

Papers: Smith (arXiv:1506.01186), section 3.3; the exponential sweep and its smoothing are Gugger's and fastai's (arXiv:2002.04688).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.optim.kept import as_it_was, put_back, taken

Batch = TypeVar("Batch")
LossOf = Callable[[nn.Module, Batch], Tensor]
"""The model and a batch to the mean loss, ()."""

BREAKS = 4.0
"""A smoothed loss of so many times the best, and above the first, is the end of the test."""
_SMOOTHING = 0.9
_BEGINS, _FALLS = 0.1, 0.02


@dataclass(frozen=True)
class Suggestion:
    """Learning rates. begins: a tenth of the fall is done. steepest: the loss falls fastest. bottom: it stops falling. reason: in words."""

    begins: float
    steepest: float
    bottom: float
    reason: str

    @property
    def peak(self) -> float:
        """For schedules that rise and fall: between the steepest place and the bottom, in the geometric mean."""
        return math.sqrt(self.steepest * self.bottom)


@dataclass(frozen=True)
class RangeTest:
    """One curve: ``losses[i]`` was seen with ``lrs[i]``. broke: the test ended because the loss did."""

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    broke: bool
    smoothing: float = _SMOOTHING

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The losses without their noise: the mean of a pass forwards and one backwards, for one alone lags behind by some ten steps.

        What has broken counts no more than it needs to break; from the first loss on that is no number all are NaN.
        """
        calm = list(takewhile(math.isfinite, self.losses))
        most = _most(calm) if calm else math.nan
        capped = [min(loss, most) for loss in calm]
        back = reversed(smooth(capped[::-1], self.smoothing))
        means = tuple((one + other) / 2 for one, other in zip(smooth(capped, self.smoothing), back))
        return means + (math.nan,) * (len(self.losses) - len(means))

    def suggestion(self) -> Suggestion:
        """Learning rates, and why.

        Raises:
            UserError: the loss never falls.
        """
        curve = self.smoothed
        finite = [number for number, loss in enumerate(curve) if math.isfinite(loss)]
        bottom = min(finite, key=curve.__getitem__, default=0)
        fall = curve[0] - curve[bottom] if finite else math.nan
        if not fall > _FALLS * abs(curve[0]) or bottom < 2:
            raise UserError("the loss never falls in this test: begin with a lower learning rate, or take more steps")
        begins = next(number for number in range(bottom + 1) if curve[number] <= curve[0] - _BEGINS * fall)
        slopes = {
            number: (curve[number + 1] - curve[number - 1]) / math.log(self.lrs[number + 1] / self.lrs[number - 1])
            for number in range(1, bottom)
        }
        steepest = min(slopes, key=slopes.__getitem__)
        end = f"breaks before {self.lrs[-1]:.2g}" if self.broke else f"has not broken at {self.lrs[-1]:.2g}"
        reason = (
            f"the loss begins to fall at {self.lrs[begins]:.2g}, falls fastest at {self.lrs[steepest]:.2g}, is lowest at "
            f"{self.lrs[bottom]:.2g} and {end}"
        )
        return Suggestion(self.lrs[begins], self.lrs[steepest], self.lrs[bottom], reason)


def smooth(losses: Sequence[float], smoothing: float) -> tuple[float, ...]:
    """The exponential mean,  m <- smoothing * m + (1 - smoothing) * loss,  divided by 1 - smoothing ** k, for it begins at 0."""
    mean, means = 0.0, []
    for count, loss in enumerate(losses, 1):
        mean = smoothing * mean + (1 - smoothing) * loss
        means.append(mean / (1 - smoothing**count))
    return tuple(means)


def range_test(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: LossOf[Batch],
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 100,
    group: dist.ProcessGroup | None = None,
) -> RangeTest:
    """One run whose learning rate grows at each step.

    Args:
        optimizer: of ``model``; the first group gets the learning rate, the others the same multiple of theirs.
        batches: as many as ``steps``, or more; this rank's.
        loss_of: called with the model in training mode.
        group: the ranks over which ``model`` averages gradients; None for this process alone.

    Raises:
        UserError: too few steps or batches, or a range that does not rise.
    """
    lrs = _sweep(lowest, highest, steps)
    losses: list[float] = []
    broke = False
    with as_it_was(model, optimizer):
        trial, stream = _Trial(model, optimizer, loss_of, group), _enough(batches, steps)
        for lr in lrs:
            losses.append(trial.step(next(stream), lr))
            curve = smooth(losses, _SMOOTHING)
            if broke := _broken(curve):
                break
    return RangeTest(lrs[: len(losses)], tuple(losses), broke)


def range_test_with_reset(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: LossOf[Batch],
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    rates: int = 20,
    steps_each: int = 10,
    group: dist.ProcessGroup | None = None,
) -> RangeTest:
    """For each of ``rates`` learning rates a run of ``steps_each`` steps from the same weights; the loss is that of the batch after them.

    The arguments and errors are those of :func:`range_test`; of ``batches``, ``steps_each + 1`` are used, and kept.
    """
    lrs = _sweep(lowest, highest, rates)
    losses: list[float] = []
    broke = False
    with as_it_was(model, optimizer):
        trial, stream = _Trial(model, optimizer, loss_of, group), _enough(batches, steps_each + 1)
        shown = [next(stream) for _ in range(steps_each + 1)]
        start = taken(model, optimizer)
        for lr in lrs:
            put_back(start, model, optimizer)
            for batch in shown[:-1]:
                trial.step(batch, lr)
            losses.append(trial.loss(shown[-1]))
            if broke := _broken(losses):
                break
    return RangeTest(lrs[: len(losses)], tuple(losses), broke, smoothing=0.0)  # each loss is a run of its own


def _sweep(lowest: float, highest: float, count: int) -> tuple[float, ...]:
    if not 0 < lowest < highest < math.inf:
        raise UserError(f"the range goes from {lowest} to {highest}: let it rise, from above 0")
    if count < 5:
        raise UserError(f"{count} learning rates make no curve: use at least 5")
    return tuple(lowest * (highest / lowest) ** (number / (count - 1)) for number in range(count))


def _enough(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    given = 0
    for batch in islice(batches, count):
        given += 1
        yield batch
    raise UserError(f"{given} batches, and the test takes {count}: give more, an endless iterator for one")


def _broken(curve: Sequence[float]) -> bool:
    return not curve[-1] <= _most(curve)  # NaN is not


def _most(curve: Sequence[float]) -> float:
    return max(BREAKS * min(curve), curve[0])


class _Trial(Generic[Batch]):
    """What steps of a test have in common."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf[Batch], group: dist.ProcessGroup | None) -> None:
        self.model, self.optimizer, self.loss_of, self.group = model, optimizer, loss_of, group
        first = optimizer.param_groups[0]["lr"]
        self.multiples = [parameters["lr"] / first if first else 1.0 for parameters in optimizer.param_groups]

    def step(self, batch: Batch, lr: float) -> float:
        """One step with that learning rate; the loss before it, the mean of all ranks."""
        for parameters, multiple in zip(self.optimizer.param_groups, self.multiples, strict=True):
            parameters["lr"] = lr * multiple
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.model, batch)
        loss.backward()
        getattr(self.model, "finish_grad_sync", lambda: None)()
        self.optimizer.step()
        return self._mean(loss)

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        """Without a step, the mean of all ranks."""
        return self._mean(self.loss_of(self.model, batch))

    def _mean(self, loss: Tensor) -> float:
        value = loss.detach().float()
        if self.group is not None:
            dist.all_reduce(value, group=self.group)  # all ranks need it: they decide alike whether the test goes on
            value = value / dist.get_world_size(self.group)
        return float(value)
