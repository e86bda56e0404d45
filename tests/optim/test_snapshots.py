"""A snapshot is taken at the end of each cycle; the ensemble predicts the mean of the probabilities of its
members.
"""

import math

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.snapshots import SnapshotEnsemble


class Counting(nn.Module):
    """A model whose logits identify the step of the snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x * 0) + self.logits


@pytest.mark.parametrize(
    ("steps", "snapshots", "taken"),
    [(12, 3, [4, 8, 12]), (10, 3, [4, 8, 10]), (5, 1, [5]), (3, 3, [1, 2, 3])],
)
def test_snapshots_are_taken_at_the_end_of_each_cycle(steps, snapshots, taken):
    ensemble, model = SnapshotEnsemble(steps, snapshots), Counting()
    for step in range(1, steps + 1):
        nn.init.constant_(model.logits, step)
        ensemble.after_step(step, model)
    assert [int(state["logits"][0]) for state in ensemble.states] == taken


def test_the_schedule_equals_that_of_the_paper():
    schedule, cycle = SnapshotEnsemble(50, 4).schedule, math.ceil(50 / 4)
    for t in range(1, 51):
        assert schedule(t - 1) == pytest.approx((math.cos(math.pi * ((t - 1) % cycle) / cycle) + 1) / 2)


def test_the_ensemble_is_the_mean_of_probabilities_and_restores_the_model():
    torch.manual_seed(0)
    model, ensemble, x = Counting(), SnapshotEnsemble(2, 2), torch.randn(5, 3)
    each = []
    for step in (1, 2):
        nn.init.normal_(model.logits, std=3)
        nn.init.normal_(model.norm.running_mean)
        ensemble.after_step(step, model)
        each.append(model.eval()(x).softmax(-1).detach())
    nn.init.normal_(model.logits)
    model.train()
    model.norm.eval()  # as for a frozen layer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.allclose(ensemble.probabilities(model, x), (each[0] + each[1]) / 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model.norm.training
    assert len(ensemble) == 2


def test_an_invalid_ensemble_raises_with_the_cure():
    with pytest.raises(UserError, match="4 snapshots in 3 steps"):
        SnapshotEnsemble(3, 4)
    with pytest.raises(UserError, match="has no snapshots"):
        SnapshotEnsemble(1, 1).probabilities(Counting(), torch.zeros(1, 3))
