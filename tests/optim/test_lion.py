"""Lion equals the three lines of its paper, in float64 without tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim import ScheduleLR
from dlo_lib.optim.lion import Lion
from dlo_lib.optim.schedules import OneCycle

BETA1, BETA2 = 0.9, 0.99


@pytest.mark.parametrize("foreach", [True, False])
def test_every_step_is_that_of_the_paper(foreach: bool):
    draw = np.random.default_rng(0)
    values = [draw.normal(size=shape) for shape in ((5, 3), (4,), ())]
    averages = [np.zeros_like(value) for value in values]
    params = [nn.Parameter(torch.tensor(value)) for value in values]
    groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}]
    optimizer = Lion(groups, lr=0.1, betas=(BETA1, BETA2), foreach=foreach)
    for step in range(6):
        if step == 3:  # a resumed run
            saved = optimizer.state_dict()
            optimizer = Lion(groups, foreach=foreach)
            optimizer.load_state_dict(saved)
        rate = 0.1 / (1 + step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for number, (value, param) in enumerate(zip(values, params)):
            if number == 1 and step == 2:  # without a gradient nothing moves
                param.grad = None
                continue
            grad = np.asarray(draw.normal(size=value.shape))
            param.grad = torch.tensor(grad)
            decay = 0.3 if number == 0 else 0.0
            update = BETA1 * averages[number] + (1 - BETA1) * grad
            values[number] = value * (1 - rate * decay) - rate * np.sign(update)
            averages[number] = BETA2 * averages[number] + (1 - BETA2) * grad
        optimizer.step()
        for value, average, param in zip(values, averages, params):
            np.testing.assert_allclose(param.detach().numpy(), value, rtol=0, atol=1e-14)
            np.testing.assert_allclose(optimizer.state[param]["exp_avg"].numpy(), average, rtol=0, atol=1e-14)


def test_a_closure_a_schedule_with_momentum_and_a_sparse_gradient():
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = Lion([param], lr=0.5)
    schedule = ScheduleLR(optimizer, OneCycle(10))
    beta1 = optimizer.param_groups[0]["betas"][0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    assert torch.equal(param.detach(), torch.full((3, 2), 1 - optimizer.param_groups[0]["lr"]))
    schedule.step()
    assert optimizer.param_groups[0]["betas"][0] < beta1
    param.grad = torch.eye(3)[:, :2].to_sparse()
    with pytest.raises(UserError, match="sparse=False"):
        optimizer.step()
