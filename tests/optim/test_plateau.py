"""Reduce on plateau equals PyTorch's for random losses and resumes from its state."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_lib.base.errors import UserError
from dlo_lib.optim.plateau import PlateauState, ReduceOnPlateau

losses_so_far = st.lists(st.sampled_from([0.5, 0.9, 0.99, 1.0, 1.01, 3.0, math.nan]), min_size=1, max_size=60)


@given(
    losses=losses_so_far,
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    threshold=st.sampled_from([0.0, 1e-4, 0.05]),
)
def test_every_factor_equals_that_of_pytorch(losses, patience, cooldown, threshold):
    rule = ReduceOnPlateau(gamma=0.5, patience=patience, threshold=threshold, cooldown=cooldown, lowest=0.01)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=patience, threshold=threshold, cooldown=cooldown, min_lr=0.01, eps=0.0
    )
    state = PlateauState()
    for loss in losses:
        state = rule.after(state, loss)
        peer.step(loss)
        assert state.factor == pytest.approx(optimizer.param_groups[0]["lr"])


def test_a_run_resumes_from_the_four_numbers():
    rule, losses = (
        ReduceOnPlateau(patience=1, cooldown=1),
        [3.0, 2.0, 2.0, 2.0, 2.5, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0],
    )
    whole = state = PlateauState()
    for number, loss in enumerate(losses):
        whole = rule.after(whole, loss)
        state = rule.after(PlateauState(**json.loads(json.dumps(dataclasses.asdict(state)))), loss)
        assert state == whole, number
    assert whole.factor < 1


def test_a_gamma_that_does_not_reduce_raises():
    with pytest.raises(UserError, match="gamma is 1.0: use a number between 0 and 1"):
        ReduceOnPlateau(gamma=1.0)
