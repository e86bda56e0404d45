"""Snapshot ensembles: train once with warm restarts, save the model at the end of each cycle, predict with
all of them.

For at most M snapshots in T steps, a cycle has  ceil(T / M)  steps, and a snapshot is taken at the end of
each cycle, where the rate of the cosine is lowest. There may be fewer than M cycles, and the last one may be
shorter and end at a higher rate: (T, M) = (5, 4) gives cycles of 2, 2 and 1 steps. The restart moves the
weights to another minimum. The prediction is the mean of the probabilities of the K members,
p(x) = 1/K sum_i softmax(f_i(x)).  Cost: one training, K times the storage and K times the work for a
prediction.

Paper: Huang et al., Snapshot ensembles: train 1, get M for free (arXiv:1704.00109).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.schedules import CosineRestarts


class SnapshotEnsemble:
    """Save up to ``snapshots`` copies of a model during a run of ``steps`` steps, on its device, and predict
    with all of them.

    The run must follow ``schedule``: a cosine from 1 to 0 for each snapshot.

    Raises:
        UserError: there are more snapshots than steps, or none.
    """

    def __init__(self, steps: int, snapshots: int) -> None:
        if not 1 <= snapshots <= steps:
            raise UserError(
                f"{snapshots} snapshots in {steps} steps: use at least 1 and at most as many as steps"
            )
        self.steps = steps
        self.schedule = CosineRestarts(period=math.ceil(steps / snapshots))
        self.states: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.states)

    def after_step(self, step: int, model: nn.Module) -> None:
        """Save ``model`` if ``step``, counted from 1, is the last step of a cycle or of the run."""
        if step % self.schedule.period == 0 or step == self.steps:
            self.states.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    def probabilities(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the mean of the probabilities of the members, (batch, classes).

        The snapshots are loaded into ``model``, which is restored afterwards.

        Raises:
            UserError: there are no snapshots.
        """
        if not self.states:
            raise UserError("the ensemble has no snapshots: call after_step after each step of the run")
        with _preserved(model), torch.no_grad():
            total = torch.zeros(())
            for state in self.states:
                model.load_state_dict(state)
                total = total.to(inputs.device) + model.eval()(inputs).softmax(-1)
        return total / len(self.states)


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        model.load_state_dict(before)
        for module in training:
            module.training = True
