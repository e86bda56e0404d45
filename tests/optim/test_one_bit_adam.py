"""1-bit Adam equals its paper, which a twin computes in float64 for all ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.optim.one_bit_adam import OneBitAdam, VarianceCriterion

SHAPES, RATE, EPS, BETAS, DECAY = ((5, 3), (4,), ()), 0.1, 1e-3, (0.8, 0.9), 0.3
STEPS, SWITCH, WORLD = 9, 4, 3


def gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def signs(x: Tensor) -> Tensor:
    scale = x.abs().mean()
    return torch.where(x >= 0, scale, -scale)


def twin() -> list[Tensor]:
    """Return the parameters, flat, after each step."""
    size = sum(torch.Size(shape).numel() for shape in SHAPES)
    part = -(-size // (8 * WORLD)) * 8
    p, m, v = torch.ones(3, size, dtype=torch.float64)
    m, v = 0 * m, 0 * v
    of_rank, of_part = [0 * m] * WORLD, [0 * each for each in m.split(part)]
    history = []
    for step in range(1, STEPS + 1):
        flat = [torch.cat([grad.flatten() for grad in gradients(step, rank)]) for rank in range(WORLD)]
        if step <= SWITCH:
            mean = torch.stack(flat).mean(0)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * mean, BETAS[1] * v + (1 - BETAS[1]) * mean**2
        else:
            sent = []
            for rank, grad in enumerate(flat):
                x = BETAS[0] * m + (1 - BETAS[0]) * grad + of_rank[rank]
                sent.append(signs(x))
                of_rank[rank] = x - sent[-1]
            found = []
            for number, mean in enumerate(torch.stack(sent).mean(0).split(part)):
                x = mean + of_part[number]
                found.append(signs(x))
                of_part[number] = x - found[-1]
            m = torch.cat(found)
        root = (v / (1 - BETAS[1] ** min(step, SWITCH))).sqrt()
        p = p * (1 - RATE * DECAY) - RATE * m / (1 - BETAS[0] ** step) / (root + EPS)
        history.append(p)
    return history


def make(params: list[nn.Parameter], **more: Any) -> OneBitAdam:
    options: dict[str, Any] = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, "freeze_after": SWITCH}
    return OneBitAdam(params, **options, **more)


def steps_of_a_rank() -> list[Tensor]:
    params = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
    optimizer, history = make(params, lr=RATE), []
    for step in range(1, STEPS + 1):
        if step == 7:  # a resumed run
            saved = optimizer.state_dict()
            optimizer = make(params)
            optimizer.load_state_dict(saved)
        for param, grad in zip(params, gradients(step, dist.get_rank())):
            param.grad = grad
        optimizer.step()
        assert optimizer.compressing == (step >= SWITCH)
        history.append(torch.cat([param.detach().flatten() for param in params]))
    params[0].grad = None
    with pytest.raises(UserError, match="parameter 0 has no gradient"):
        optimizer.step()
    return history


def test_every_step_is_that_of_the_paper_on_every_rank():
    ranks = run_ranks(steps_of_a_rank, WORLD)
    for step, want in enumerate(twin()):
        for rank in range(WORLD):
            torch.testing.assert_close(ranks[rank][step], want, rtol=0, atol=1e-12)
            assert torch.equal(ranks[rank][step], ranks[0][step])


def test_the_criterion_waits_for_a_stable_corrected_variance_and_for_the_learning_rate():
    beta2, generator = 0.9, torch.Generator().manual_seed(0)
    corrected, late, raw = (
        VarianceCriterion(beta2),
        VarianceCriterion(beta2, after=90),
        VarianceCriterion(beta2),
    )
    assert corrected.distance == 10
    v = torch.zeros(2000)
    fired: dict[VarianceCriterion, int] = {}
    for step in range(1, 101):
        size = 0.98 ** min(step, 40)  # gradients shrink until the training has found its way
        v = beta2 * v + (1 - beta2) * (size * torch.randn(len(v), generator=generator)).square()
        norm = float(v.sum())
        for criterion, given in ((corrected, norm / (1 - beta2**step)), (late, norm), (raw, norm)):
            if criterion.stable(step, given):
                fired.setdefault(criterion, step)
    assert fired[raw] == 11  # as soon as it can: the raw variance only grows at first
    assert 45 < fired[corrected] < 80
    assert fired[late] == 90
