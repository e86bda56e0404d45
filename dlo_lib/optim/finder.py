"""The learning-rate range test: train a few steps with an exponentially growing learning rate and record the
loss.

At step i of n the learning rate is  lr_i = lowest * (highest / lowest) ** (i / (n - 1)).  The test stops when
the smoothed loss exceeds both its first value and ``DIVERGENCE_RATIO`` times its minimum. The variant with a
reset trains every learning rate from the same weights on the same batches. It costs more steps, but a
learning rate does not affect the next one. Both variants restore the model, the optimiser and the random
number generators.

Under data parallelism, every rank calls the test with its own batches. The losses are averaged over the
ranks, so that all ranks record the same curve and stop at the same step; this sends one number per step.
Cost: the steps and a copy of the model and of the optimiser state.

Papers: Smith (arXiv:1506.01186), section 3.3; the exponential sweep and its smoothing are by Gugger and
fastai (arXiv:2002.04688)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.saved_state import preserved_state, restore_state, save_state

Batch = TypeVar("Batch")
LossOf = Callable[[nn.Module, Batch], Tensor]
"""Maps the model and a batch to the mean loss, ()."""

DIVERGENCE_RATIO = 4.0
"""The test stops when the smoothed loss exceeds this multiple of its minimum and its first value."""
_SMOOTHING = 0.9
_BEGINS, _FALLS = 0.1, 0.02


@dataclass(frozen=True)
class Suggestion:
    """The learning rates that a range test suggests.

    Attributes:
        begins: the loss has fallen by a tenth of its total fall.
        steepest: the loss falls fastest.
        bottom: the loss is lowest.
        reason: the values as text.
    """

    begins: float
    steepest: float
    bottom: float
    reason: str

    @property
    def peak(self) -> float:
        """The peak for a schedule that rises and falls: the geometric mean of ``steepest`` and ``bottom``."""
        return math.sqrt(self.steepest * self.bottom)


@dataclass(frozen=True)
class RangeTest:
    """The curve of a test: ``losses[i]`` is the loss at ``lrs[i]``.

    ``diverged``: the test stopped at a diverging loss.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool
    smoothing: float = _SMOOTHING

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The smoothed losses: the mean of a forward and a backward pass, because one pass lags by about ten
        steps.

        Losses above the divergence bound are clipped to it. From the first NaN or infinite loss on, all
        values are NaN."""
        finite = list(takewhile(math.isfinite, self.losses))
        bound = _bound(finite) if finite else math.nan
        capped = [min(loss, bound) for loss in finite]
        back = reversed(smooth(capped[::-1], self.smoothing))
        means = tuple((one + other) / 2 for one, other in zip(smooth(capped, self.smoothing), back))
        return means + (math.nan,) * (len(self.losses) - len(means))

    def suggestion(self) -> Suggestion:
        """Return the suggested learning rates.

        Raises:
            UserError: the loss never falls.
        """
        curve = self.smoothed
        finite = [number for number, loss in enumerate(curve) if math.isfinite(loss)]
        bottom = min(finite, key=curve.__getitem__, default=0)
        fall = curve[0] - curve[bottom] if finite else math.nan
        if not fall > _FALLS * abs(curve[0]) or bottom < 2:
            raise UserError(
                "the loss never falls in this test: start at a lower learning rate or use more steps"
            )
        begins = next(number for number in range(bottom + 1) if curve[number] <= curve[0] - _BEGINS * fall)
        slopes = {
            number: (curve[number + 1] - curve[number - 1])
            / math.log(self.lrs[number + 1] / self.lrs[number - 1])
            for number in range(1, bottom)
        }
        steepest = min(slopes, key=slopes.__getitem__)
        end = (
            f"diverges at {self.lrs[-1]:.2g}"
            if self.diverged
            else f"its smoothed value stays bounded up to {self.lrs[-1]:.2g}"
        )
        reason = (
            f"the loss begins to fall at {self.lrs[begins]:.2g}, falls fastest at {self.lrs[steepest]:.2g}, "
            f"is lowest at {self.lrs[bottom]:.2g} and {end}"
        )
        return Suggestion(self.lrs[begins], self.lrs[steepest], self.lrs[bottom], reason)


def smooth(losses: Sequence[float], smoothing: float) -> tuple[float, ...]:
    """Compute the exponential moving average  m <- smoothing * m + (1 - smoothing) * loss.

    The k-th value is divided by  1 - smoothing ** k,  because m starts at 0.
    """
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
    """Run one training whose learning rate grows at each step.

    Args:
        optimizer: the optimiser of ``model``. The first group gets the learning rate; the ratios of the
            groups are kept.
        batches: at least ``steps`` batches of this rank.
        loss_of: called with the model in training mode.
        group: the ranks over which ``model`` averages gradients; None for this process alone.

    Raises:
        UserError: there are too few steps or batches, or the range does not rise.
    """
    lrs = _sweep(lowest, highest, steps)
    losses: list[float] = []
    diverged = False
    with preserved_state(model, optimizer):
        trial, stream = _Trial(model, optimizer, loss_of, group), _enough(batches, steps)
        for lr in lrs:
            losses.append(trial.step(next(stream), lr))
            curve = smooth(losses, _SMOOTHING)
            if diverged := _has_diverged(curve):
                break
    return RangeTest(lrs[: len(losses)], tuple(losses), diverged)


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
    """Run ``steps_each`` steps from the same weights for each of ``rates`` learning rates.

    The loss of a learning rate is the loss of the next batch after its steps. Arguments and errors are those
    of :func:`range_test`. The first ``steps_each + 1`` of ``batches`` are used and held in memory."""
    lrs = _sweep(lowest, highest, rates)
    losses: list[float] = []
    diverged = False
    with preserved_state(model, optimizer):
        trial, stream = _Trial(model, optimizer, loss_of, group), _enough(batches, steps_each + 1)
        shown = [next(stream) for _ in range(steps_each + 1)]
        start = save_state(model, optimizer)
        for lr in lrs:
            restore_state(start, model, optimizer)
            for batch in shown[:-1]:
                trial.step(batch, lr)
            losses.append(trial.loss(shown[-1]))
            if diverged := _has_diverged(losses):
                break
    return RangeTest(lrs[: len(losses)], tuple(losses), diverged, smoothing=0.0)  # the runs are separate


def _sweep(lowest: float, highest: float, count: int) -> tuple[float, ...]:
    if not 0 < lowest < highest < math.inf:
        raise UserError(f"the range goes from {lowest} to {highest}: use 0 < lowest < highest")
    if count < 5:
        raise UserError(f"{count} learning rates are too few for a curve: use at least 5")
    return tuple(lowest * (highest / lowest) ** (number / (count - 1)) for number in range(count))


def _enough(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    given = 0
    for batch in islice(batches, count):
        given += 1
        yield batch
    raise UserError(
        f"there are {given} batches and the test needs {count}: pass more, for example an endless iterator"
    )


def _has_diverged(curve: Sequence[float]) -> bool:
    return not curve[-1] <= _bound(curve)  # true for NaN


def _bound(curve: Sequence[float]) -> float:
    return max(DIVERGENCE_RATIO * min(curve), curve[0])


class _Trial(Generic[Batch]):
    """The training steps of a test."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOf[Batch],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.model, self.optimizer, self.loss_of, self.group = model, optimizer, loss_of, group
        first = optimizer.param_groups[0]["lr"]
        self.multiples = [parameters["lr"] / first if first else 1.0 for parameters in optimizer.param_groups]

    def step(self, batch: Batch, lr: float) -> float:
        """Take one step at learning rate ``lr``; return the loss before it, averaged over all ranks."""
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
        """Return the loss, averaged over all ranks, without a step."""
        return self._mean(self.loss_of(self.model, batch))

    def _mean(self, loss: Tensor) -> float:
        value = loss.detach().float()
        if self.group is not None:
            dist.all_reduce(value, group=self.group)  # on all ranks, so that they stop at the same step
            value = value / dist.get_world_size(self.group)
        return float(value)
