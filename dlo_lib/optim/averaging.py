"""An average of the weights of many steps, which is often better than the weights of the last one.

    EMA:    a <- d a + (1 - d) p         after every step; d_t = min(d, (1 + t) / (10 + t))
    SWA:    a <- a + (p - a) / (n + 1)   after every ``every``-th step from ``start`` on

The weights of a training at a constant rate move around a minimum, and their average lies inside. EMA forgets
the beginning: d = 0.999 remembers about 1,000 steps, and the factor (1 + t) / (10 + t) fewer while there are
fewer. SWA is the plain mean of the end of a training. Batch norms have statistics of the weights of the last
step: compute them anew for the average (``torch.optim.swa_utils.update_bn``).

The average is a state of the optimiser, ``average``, so that a checkpoint saves and restores it. A rank of
ZeRO, FSDP or tensor parallelism averages its part, without communication. Cost: one more copy of the
parameters, and one pass over it in each step.

Papers: B. Polyak and A. Juditsky, Acceleration of Stochastic Approximation by Averaging (1992); P. Izmailov
et al., Averaging Weights Leads to Wider Optima and Better Generalization (arXiv:1803.05407).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlo_lib.base.errors import UserError, require_count

AVERAGE, COUNT = "average", "averaged"
"""The states of each parameter: a, and how many weights it has."""
AVERAGE_KEYS = frozenset({AVERAGE, COUNT})


class Averaging(enum.Enum):
    """The average of the weights."""

    NONE = "none"
    EMA = "ema"
    SWA = "swa"


class WeightAverage:
    """Averages the parameters of ``optimizer`` after each of its steps.

    Args:
        optimizer: holds the parameters, or this rank's parts of them, and the average in its state. For a
            sharded optimiser, see ``parallel.protocol.averaged_optimizer``.
        kind: EMA or SWA.
        decay: d, of EMA.
        start: the first step that SWA averages, from 1.
        every: the steps between two weights of SWA.
        after_swap: is called when the parameters have got other values, for example to send the pieces of
            this rank to the other ranks.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: Averaging,
        decay: float = 0.999,
        start: int = 1,
        every: int = 1,
        after_swap: Callable[[], None] | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"decay is {decay}: choose a number from 0 to below 1, such as 0.999")
        require_count("start", start)
        require_count("every", every)
        self.optimizer, self.kind, self.decay, self.start, self.every = optimizer, kind, decay, start, every
        self._after_swap = after_swap

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take the weights after step ``step``, from 1, into the average."""
        if self.kind is Averaging.SWA and (step < self.start or (step - self.start) % self.every):
            return
        if self.kind is Averaging.NONE:
            return
        for param in self._params():
            state = self.optimizer.state[param]
            if AVERAGE not in state:
                state[AVERAGE] = param.detach().clone(memory_format=torch.preserve_format)
                state[COUNT] = torch.tensor(1.0)
                continue
            count = float(state[COUNT])
            share = 1 / (count + 1)
            if self.kind is Averaging.EMA:
                share = 1 - min(self.decay, (1 + count) / (10 + count))
            state[AVERAGE].lerp_(param, share)
            state[COUNT] += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the parameters hold the average in the block, to evaluate or to save it.

        Raises:
            UserError: there is no average yet.
        """
        if not self.begun:
            raise UserError(f"there is no average yet: {self.kind.value} begins after step {self.start}")
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @property
    def begun(self) -> bool:
        """Whether there is an average."""
        return any(AVERAGE in self.optimizer.state[param] for param in self._params())

    @torch.no_grad()
    def _swap(self) -> None:
        for param in self._params():
            state = self.optimizer.state[param]
            if AVERAGE in state:
                held = param.detach().clone(memory_format=torch.preserve_format)
                param.copy_(state[AVERAGE])
                state[AVERAGE].copy_(held)
        if self._after_swap is not None:
            self._after_swap()

    def _params(self) -> list[Any]:
        return [
            param for group in self.optimizer.param_groups for param in group["params"] if param.requires_grad
        ]
