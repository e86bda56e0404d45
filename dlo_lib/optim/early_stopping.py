"""Early stopping: end a training when the validation loss has stopped falling, and return to the best
weights.

A loss counts as better if it is below ``best - threshold``. After ``patience`` losses in a row that are not
better, the training should stop. The state is small and belongs in the checkpoint. Under data parallelism,
pass every rank the same loss, the mean over all ranks: otherwise some ranks stop and the others wait for
them.

L. Prechelt, Early Stopping - But When? (in Neural Networks: Tricks of the Trade, 1998).
"""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import nn

from dlo_lib.base.errors import UserError


class EarlyStopping:
    """Watch a validation loss and keep a copy of the best weights.

    Args:
        patience: the number of losses in a row that may not be better, at least 1.
        threshold: the improvement from which a loss counts as better, in units of the loss.
        model: the model whose best ``state_dict`` is kept, on the CPU; None keeps none.

    Attributes:
        best: the lowest loss so far.
        best_call: the number of the call that gave it, from 0; None before it.

    Raises:
        UserError: ``patience`` is below 1 or ``threshold`` negative.
    """

    def __init__(self, patience: int = 5, threshold: float = 0.0, model: nn.Module | None = None) -> None:
        if patience < 1 or threshold < 0:
            raise UserError(f"patience={patience}, threshold={threshold}: use at least 1, and at least 0")
        self.patience, self.threshold, self._model = patience, threshold, model
        self.best = math.inf
        self.best_call: int | None = None
        self._calls = 0
        self._weights: dict[str, Any] | None = None

    def stops(self, loss: float) -> bool:
        """Record ``loss`` and return whether the training should stop. NaN never counts as better."""
        if loss < self.best - self.threshold or (self.best == math.inf and loss < math.inf):
            self.best, self.best_call = loss, self._calls
            if self._model is not None:
                self._weights = {
                    name: value.detach().cpu().clone() if hasattr(value, "detach") else copy.deepcopy(value)
                    for name, value in self._model.state_dict().items()
                }
        self._calls += 1
        since = self._calls - 1 - (-1 if self.best_call is None else self.best_call)
        return since >= self.patience

    def restore(self) -> None:
        """Load the best weights into the model.

        Raises:
            UserError: there is no model, or no loss was finite yet.
        """
        if self._model is None or self._weights is None:
            raise UserError("there are no best weights: give a model, and record a finite loss first")
        self._model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, with the best weights."""
        return {
            "best": self.best, "best_call": self.best_call, "calls": self._calls, "weights": self._weights
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_call = state_dict["best"], state_dict["best_call"]
        self._calls, self._weights = state_dict["calls"], state_dict["weights"]
