"""Snapshot ensembles: one run with warm restarts, whose model is kept at the end of each cycle; together these predict
better than one.

With M cycles in T steps a snapshot is taken after every  ceil(T / M)  steps, where the cosine has come down; the restart throws the next
one elsewhere. The prediction is the mean of the members' probabilities,  p(x) = 1/M sum_i softmax(f_i(x)).  Cost: one training, M times the
storage, M times the work to predict.

Paper: Huang et al., Snapshot ensembles: train 1, get M for free (arXiv:1704.00109).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.optim.schedules import CosineRestarts


class SnapshotEnsemble:
    """Keeps ``snapshots`` copies of the model of a run of ``steps`` steps, on its device, and predicts with all of them.

    ``schedule`` is what the run is to follow: a cosine from 1 to 0 for each snapshot.

    Raises:
        UserError: more snapshots than steps, or none.
    """

    def __init__(self, steps: int, snapshots: int) -> None:
        if not 1 <= snapshots <= steps:
            raise UserError(f"{snapshots} snapshots in {steps} steps: use at least 1 and at most as many as steps")
        self.steps = steps
        self.schedule = CosineRestarts(period=math.ceil(steps / snapshots))
        self.states: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.states)

    def after_step(self, step: int, model: nn.Module) -> None:
        """Keep ``model`` if the ``step``-th step, from 1, was the last of a cycle, or of all."""
        if step % self.schedule.period == 0 or step == self.steps:
            self.states.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    def probabilities(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The mean of the members' probabilities, (batch, classes); ``model`` lends its code and is left as it was.

        Raises:
            UserError: there are no snapshots.
        """
        if not self.states:
            raise UserError("the ensemble has no snapshots: call after_step after each step of the run")
        with _as_it_was(model), torch.no_grad():
            total = torch.zeros(())
            for state in self.states:
                model.load_state_dict(state)
                total = total.to(inputs.device) + model.eval()(inputs).softmax(-1)
        return total / len(self.states)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        model.load_state_dict(before)
        for module in training:
            module.training = True
