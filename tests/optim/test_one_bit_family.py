"""1-bit LAMB and 0/1 Adam equal twins, which compute all ranks in one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.optim.flat_moments import FlatMoments
from dlo_lib.optim.lamb import LAMB
from dlo_lib.optim.one_bit_lamb import OneBitLAMB
from dlo_lib.optim.zero_one_adam import ZeroOneAdam
from tests.optim.test_one_bit_adam import BETAS, DECAY, EPS, RATE, SHAPES, WORLD, gradients, signs

STEPS, SWITCH = 12, 5
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
PART = -(-sum(SIZES) // (8 * WORLD)) * 8


class OneBitTwin:
    """The one-bit mean of all ranks, with both errors."""

    def __init__(self) -> None:
        zeros = torch.zeros(sum(SIZES), dtype=torch.float64)
        self.of_rank, self.of_part = [zeros] * WORLD, list(zeros.split(PART))

    def __call__(self, ranks: list[Tensor]) -> Tensor:
        sent = [signs(x + error) for x, error in zip(ranks, self.of_rank)]
        self.of_rank = [x + error - s for x, error, s in zip(ranks, self.of_rank, sent)]
        means = [x + e for x, e in zip(torch.stack(sent).mean(0).split(PART), self.of_part)]
        found = [signs(mean) for mean in means]
        self.of_part = [mean - part for mean, part in zip(means, found)]
        return torch.cat(found)


def flat(step: int) -> list[Tensor]:
    return [torch.cat([grad.flatten() for grad in gradients(step, rank)]) for rank in range(WORLD)]


def start() -> Tensor:
    return torch.linspace(0.5, 1.5, sum(SIZES), dtype=torch.float64)


def lamb_twin() -> list[list[Tensor]]:
    """Return the parameters of each rank after each step."""
    p, (b1, b2) = start(), BETAS
    m, v, w, mean_of = 0 * p, 0 * p, 0 * p, OneBitTwin()
    ratios, factors, scale, history = [1.0] * 3, [1.0] * 3, p, []
    for step in range(1, STEPS + 1):
        if step <= SWITCH:
            g = torch.stack(flat(step)).mean(0)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            w = v
        else:
            before = m
            m = mean_of([(b1 * m + (1 - b1) * g) / scale for g in flat(step)]) * scale
            g = (m - b1 * before) / (1 - b1)
            w = b2 * w + (1 - b2) * g * g
        root = (v / (1 - b2 ** min(step, SWITCH))).sqrt() + EPS
        fresh = (w / (1 - b2**step)).sqrt() + EPS
        parts = []
        for number, (one, u, quotient) in enumerate(
            zip(p.split(SIZES), (m / (1 - b1**step) / root).split(SIZES), (root / fresh).split(SIZES))
        ):
            u = u + DECAY * one
            ratio = 1.0
            if len(SHAPES[number]) > 1 and step <= SWITCH:
                ratio = float(one.norm() / u.norm())
                ratios[number] = ratio if step == 1 else 0.9 * ratios[number] + 0.1 * ratio
            elif len(SHAPES[number]) > 1:
                last = factors[number]
                wanted = min(max(float(quotient.max()), 0.5), 4.0)
                factors[number] = min(max(wanted, 0.9 * last), 1.1 * last)
                ratio = ratios[number] * factors[number]
            parts.append(one - RATE * ratio * u)
        p = torch.cat(parts)
        if step == SWITCH:
            scale = torch.cat([part.abs().mean().expand(len(part)) for part in m.split(SIZES)])
        history.append([p] * WORLD)
    return history


def zero_one_twin() -> list[list[Tensor]]:
    """With an interval that doubles after two exact steps, and in the second phase after three steps."""
    b1, b2 = BETAS
    p = [start()] * WORLD
    m, v = [0 * start()] * WORLD, 0 * start()
    gradient_mean, distance_mean, exact, interval, history = OneBitTwin(), OneBitTwin(), 0, 1, []
    for step in range(1, SWITCH + 1):
        if step % interval == 0:
            g = torch.stack(flat(step)).mean(0)
            v, exact = b2 * v + (1 - b2) * g * g, exact + 1
            interval *= 2 if exact % 2 == 0 else 1
        else:
            g = gradient_mean(flat(step))
        m = [b1 * m[0] + (1 - b1) * g] * WORLD
        root = (v / (1 - b2**exact)).sqrt() + EPS
        p = [(1 - RATE * DECAY) * p[0] - RATE * m[0] / (1 - b1**step) / root] * WORLD
        history.append(p)
    base, d, total, interval = p[0], [0 * m[0]] * WORLD, 0.0, 1
    for local in range(1, STEPS - SWITCH + 1):
        m = [b1 * one + (1 - b1) * g for one, g in zip(m, flat(SWITCH + local))]
        d = [one + RATE * moment for one, moment in zip(d, m)]
        p = [(1 - RATE * DECAY) * one - RATE * moment / root for one, moment in zip(p, m)]
        base, total = (1 - RATE * DECAY) * base, total + RATE
        if local % interval == 0:
            mean = distance_mean(d)
            base = base - mean / root
            p, m, d, total = [base] * WORLD, [mean / total] * WORLD, [0 * mean] * WORLD, 0.0
        interval *= 2 if local % 3 == 0 else 1
        history.append(p)
    return history


def lamb(params: list[nn.Parameter], lr: float = RATE) -> OneBitLAMB:
    return OneBitLAMB(params, SWITCH, lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY)


def zero_one(params: list[nn.Parameter], lr: float = RATE) -> ZeroOneAdam:
    intervals = {"exact_per_interval": 2, "steps_per_interval": 3, "longest": 4}
    return ZeroOneAdam(params, SWITCH, lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY, **intervals)


def parameters() -> list[nn.Parameter]:
    parts = start().split(SIZES)
    return [nn.Parameter(part.view(shape).clone()) for part, shape in zip(parts, SHAPES)]


def steps_of_a_rank(make: Callable[..., FlatMoments]) -> tuple[list[Tensor], list[list[str]]]:
    """Return the parameters after each step, and the kinds of its collectives."""
    params = parameters()
    optimizer, history, sent = make(params), [], []
    for step in range(1, STEPS + 1):
        if step in (3, 9):  # a resumed run
            saved: dict[str, Any] = optimizer.state_dict()
            optimizer = make(params, lr=9.0)
            optimizer.load_state_dict(saved)
        for param, grad in zip(params, gradients(step, dist.get_rank())):
            param.grad = grad
        with trace_collectives() as trace:
            optimizer.step()
        history.append(torch.cat([param.detach().flatten() for param in params]))
        sent.append([kind for kind in ("all_reduce", "all_to_all") if trace.bytes(kind, dist.get_rank())])
    return history, sent


@pytest.mark.parametrize(("make", "twin"), [(lamb, lamb_twin), (zero_one, zero_one_twin)])
def test_every_step_is_that_of_the_paper_on_every_rank(make, twin):
    ranks = run_ranks(steps_of_a_rank, WORLD, make)
    for step, want in enumerate(twin()):
        for rank in range(WORLD):
            torch.testing.assert_close(ranks[rank][0][step], want[rank], rtol=0, atol=1e-10)


def test_ranks_have_equal_parameters_whenever_they_have_communicated():
    ranks = run_ranks(steps_of_a_rank, WORLD, zero_one)
    for step, sent in enumerate(ranks[0][1]):
        same = all(torch.equal(ranks[rank][0][step], ranks[0][0][step]) for rank in range(WORLD))
        assert same == bool(sent), f"step {step + 1}"
    exact, one_bit = ["all_reduce"], ["all_to_all"]
    first, second = [exact, exact, one_bit, exact, one_bit], [one_bit] * 4 + [[], one_bit]
    assert ranks[0][1] == [*first, *second, []]
    lambs = run_ranks(steps_of_a_rank, WORLD, lamb)
    assert all(torch.equal(lambs[rank][0][-1], lambs[0][0][-1]) for rank in range(WORLD))


def test_the_warm_up_of_1_bit_lamb_is_lamb():
    one_bit = run_ranks(steps_of_a_rank, WORLD, lamb)[0][0]
    params = parameters()
    optimizer = LAMB(params, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(1, SWITCH + 1):
        for param, *grads in zip(params, *(gradients(step, rank) for rank in range(WORLD))):
            param.grad = torch.stack(grads).mean(0)
        optimizer.step()
        found = torch.cat([param.detach().flatten() for param in params])
        torch.testing.assert_close(one_bit[step - 1], found, rtol=0, atol=1e-12)
