"""Reduce on plateau: the learning rate falls when a measured loss has stopped falling.

It cannot be a function of the step, but it is one of the losses so far: a frozen state, and a rule that makes the next state of it and one
more loss,  state = rule.after(state, loss);  lr = peak * state.factor.  A loss counts as better when it is below best * (1 - threshold);
after more than ``patience`` that are not, the factor is multiplied by ``gamma``. The state is four plain numbers, all that a checkpoint
needs. As PyTorch's ReduceLROnPlateau with relative threshold; under data parallelism give every rank the same loss, the mean of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlo_lib.errors import UserError


@dataclass(frozen=True)
class PlateauState:
    """factor: of the peak learning rate. best: the lowest loss. bad: losses in a row that were not better. cooling: how many are
    yet to be ignored.
    """

    factor: float = 1.0
    best: float = math.inf
    bad: int = 0
    cooling: int = 0


@dataclass(frozen=True)
class ReduceOnPlateau:
    """The rule.

    Args:
        gamma: what the factor is multiplied by.
        patience: how many losses in a row may fail to be better.
        threshold: by what share a loss must be lower to be better.
        cooldown: how many losses after a reduction do not count as bad.
        lowest: the factor never falls below it.
    """

    gamma: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    cooldown: int = 0
    lowest: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}: use a number between 0 and 1")

    def after(self, state: PlateauState, loss: float) -> PlateauState:
        """The state once ``loss`` is known; NaN is not better than anything."""
        better = loss < state.best * (1 - self.threshold)
        bad = 0 if better or state.cooling else state.bad + 1
        reduce = bad > self.patience
        return PlateauState(
            factor=max(state.factor * self.gamma, self.lowest) if reduce else state.factor,
            best=loss if better else state.best,
            bad=0 if reduce else bad,
            cooling=self.cooldown if reduce else max(0, state.cooling - 1),
        )
