"""EMA and SWA equal their formulas, resume with the optimiser, and leave the weights as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.averaging import Averaging, WeightAverage
from dlo_lib.optim.batch_rules import BatchRule

STEPS = 9


def trained(kind: Averaging, resumed_after: int = 0, **options: float) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the weights after each step, the last weights again, and their average."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([param], lr=0.1)
    average = WeightAverage(optimizer, kind, **options)  # type: ignore[arg-type]
    weights = []
    for step in range(1, STEPS + 1):
        param.grad = torch.randn(3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.step()
        average.after_step(step)
        weights.append(param.detach().clone())
        if step == resumed_after:
            saved = optimizer.state_dict()
            optimizer = torch.optim.Adam([param], lr=0.1)
            optimizer.load_state_dict(saved)
            average = WeightAverage(optimizer, kind, **options)  # type: ignore[arg-type]
    with average.swapped():
        found = param.detach().clone()
    return weights, param.detach(), found


@pytest.mark.parametrize("resumed_after", [0, 5])
def test_ema_is_its_formula(resumed_after: int):
    weights, last, found = trained(Averaging.EMA, resumed_after, decay=0.4)
    want = weights[0]
    for t, weight in enumerate(weights[1:], 1):
        d = min(0.4, (1 + t) / (10 + t))
        want = d * want + (1 - d) * weight
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert torch.equal(last, weights[-1]), "the weights themselves are as before"


@pytest.mark.parametrize("resumed_after", [0, 5])
def test_swa_is_the_mean_of_every_second_weight_from_the_start(resumed_after: int):
    weights, last, found = trained(Averaging.SWA, resumed_after, start=3, every=2)
    torch.testing.assert_close(found, torch.stack(weights[2::2]).mean(0), rtol=0, atol=1e-12)
    assert torch.equal(last, weights[-1])


def test_an_average_of_noise_is_nearer_to_the_minimum():
    param = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([param], lr=0.3)
    average = WeightAverage(optimizer, Averaging.SWA, start=20)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 201):
        param.grad = param.detach() + torch.randn(100, generator=generator)
        optimizer.step()
        average.after_step(step)
    last = float(param.detach().norm())
    with average.swapped():
        assert float(param.detach().norm()) < last / 3


def test_an_average_that_has_not_begun_and_wrong_arguments_are_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    average = WeightAverage(optimizer, Averaging.SWA, start=5)
    average.after_step(4)
    assert not average.begun
    with pytest.raises(UserError, match="swa begins after step 5"), average.swapped():
        pass
    with pytest.raises(UserError, match="decay is 1.0"):
        WeightAverage(optimizer, Averaging.EMA, decay=1.0)


def test_the_batch_rules():
    assert BatchRule.LINEAR.scaled(0.1, 256, 32) == pytest.approx(0.8)
    assert BatchRule.SQRT.scaled(0.1, 128, 32) == pytest.approx(0.2)
    assert BatchRule.NONE.scaled(0.1, 128, 32) == 0.1
    with pytest.raises(UserError, match="batch of the known rate is 0"):
        BatchRule.SQRT.scaled(0.1, 128, 0)


def test_the_linear_rule_moves_as_far_as_the_small_steps_and_the_root_keeps_the_variance():
    """k steps of SGD on noise: the mean distance of a linear rule, and the variance of a square-root rule."""
    k, lr, many = 16, 0.01, 20_000
    noise = torch.randn(many, k, generator=torch.Generator().manual_seed(0)) + 0.5
    small = -lr * noise.sum(1)
    linear = -BatchRule.LINEAR.scaled(lr, k, 1) * noise.mean(1)
    torch.testing.assert_close(linear, small)
    signs, of_mean = noise.sign(), noise.mean(1).sign()  # an update of a fixed length
    root = -BatchRule.SQRT.scaled(lr, k, 1) * of_mean
    assert float(root.square().mean()) == pytest.approx(lr**2 * k)
    assert float((lr * signs).square().sum(1).mean()) == pytest.approx(lr**2 * k)
