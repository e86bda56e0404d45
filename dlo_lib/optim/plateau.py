"""Reduce on plateau: lower the learning rate when a measured loss stops falling.

The learning rate is a function of the losses so far, not of the step. A rule computes the next state from the
current state and one more loss,  state = rule.after(state, loss);  lr = peak * state.factor.  A loss counts
as better if it is below best * (1 - threshold). After more than ``patience`` losses in a row that are not
better, the factor is multiplied by ``gamma``. The state is four numbers, which is all that a checkpoint
needs. The rule equals PyTorch's ReduceLROnPlateau with a relative threshold. Under data parallelism, pass
every rank the same loss, the mean over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlo_lib.base.errors import UserError


@dataclass(frozen=True)
class PlateauState:
    """The state of the rule.

    Attributes:
        factor: the learning rate divided by its peak.
        best: the lowest loss so far.
        bad: the number of losses in a row that are not better.
        cooling: the number of further losses to ignore.
    """

    factor: float = 1.0
    best: float = math.inf
    bad: int = 0
    cooling: int = 0


@dataclass(frozen=True)
class ReduceOnPlateau:
    """The rule that reduces the learning rate on a plateau.

    Args:
        gamma: the factor is multiplied by this number.
        patience: the number of losses in a row that may not be better.
        threshold: the relative improvement from which a loss counts as better.
        cooldown: the number of losses after a reduction that do not count as bad.
        lowest: the lower bound of the factor.
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
        """Return the state after ``loss``. NaN never counts as better."""
        better = loss < state.best * (1 - self.threshold)
        bad = 0 if better or state.cooling else state.bad + 1
        reduce = bad > self.patience
        return PlateauState(
            factor=max(state.factor * self.gamma, self.lowest) if reduce else state.factor,
            best=loss if better else state.best,
            bad=0 if reduce else bad,
            cooling=self.cooldown if reduce else max(0, state.cooling - 1),
        )
