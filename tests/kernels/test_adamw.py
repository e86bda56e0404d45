"""AdamW of all parameters in one kernel, and inside the backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import BackwardAdamW, FusedAdamW, adamw_update, using
from tests.kernels.parity import BACKENDS, TOLERANCE, dtypes_of, random

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(2500,), (3, 5), (), (0,)]


def parameters(dtype):
    return [nn.Parameter(random(*shape, dtype=dtype, seed=seed)) for seed, shape in enumerate(SHAPES)]


def take_steps(params, optimizer, count=3):
    for step in range(count):
        for number, param in enumerate(params):
            param.grad = random(*param.shape, seed=100 * step + number).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_adamw(backend):
    for dtype in dtypes_of(backend):
        ours = parameters(dtype)
        exact = [nn.Parameter(param.detach().double()) for param in ours]
        optimizer, peer = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(exact, **OPTIONS)
        with using(backend):
            take_steps(ours, optimizer)
        for step in range(3):
            for number, param in enumerate(exact):
                param.grad = random(*param.shape, seed=100 * step + number).to(dtype).double()
            peer.step()
        for mine, other in zip(ours, exact):
            assert torch.allclose(mine.double(), other, rtol=0, atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_is_that_of_pytorch(backend):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer, peer = FusedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    with using(backend):
        take_steps(ours, optimizer)
        take_steps(theirs, peer)
        optimizer.load_state_dict(peer.state_dict())
        take_steps(ours, optimizer)
    assert optimizer.state[ours[0]].keys() == peer.state[theirs[0]].keys()
    assert optimizer.state[ours[0]]["step"] == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_and_parameters_without_a_gradient(backend):
    first, second = parameters(torch.float32)[:2]
    before = second.detach().clone()
    optimizer = FusedAdamW([{"params": [first], "lr": 0.5}, {"params": [second]}], lr=0.1)
    first.grad = torch.ones_like(first)
    start = first.detach().clone()
    with using(backend):
        optimizer.step()
    assert torch.equal(second, before)
    assert ((start * (1 - 0.5 * 0.01) - first.detach()) - 0.5).abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_late_gradient_and_other_layouts(backend):
    """A parameter has a separate count of steps, and its gradient or moments may have other strides."""

    def trained(kind) -> list[torch.Tensor]:
        early, late = (nn.Parameter(random(4, 3, seed=seed)) for seed in (1, 2))
        wide = nn.Parameter(random(3, 4, seed=3).T)  # dense, with the strides of a transposed tensor
        optimizer = kind([early, late, wide], **OPTIONS)
        for step in range(3):
            early.grad = random(3, 4, seed=10 + step).T
            late.grad = random(4, 3, seed=20 + step) if step else None
            wide.grad = random(4, 3, seed=30 + step)
            optimizer.step()
        return [early, late, wide]

    with using(backend):
        ours = trained(FusedAdamW)
    for mine, other in zip(ours, trained(torch.optim.AdamW), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-6)


def test_a_parameter_with_gaps_is_refused():
    with pytest.raises(UserError, match="leave gaps or repeat memory"):
        FusedAdamW([nn.Parameter(random(4, 6)[:, ::2])])


def test_the_readable_twin_is_adamw():
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    peer = torch.optim.AdamW(theirs, **OPTIONS)
    moments = [[torch.zeros_like(param) for param in ours] for _ in range(2)]
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    for step in (1, 2):
        grads = [random(*param.shape, seed=step).double() for param in ours]
        with torch.no_grad():
            adamw_update(ours, grads, *moments, step=step, **numbers)
        for param, grad in zip(theirs, grads):
            param.grad = grad.clone()
        peer.step()
    for mine, other in zip(ours, theirs):
        assert torch.allclose(mine, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_update_inside_the_backward(backend):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    ours, theirs, x = model(), model(), random(5, 3)
    inside, peer = (
        BackwardAdamW(ours.parameters(), **OPTIONS),
        torch.optim.AdamW(theirs.parameters(), **OPTIONS),
    )
    alive = []
    for param in ours.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in ours.parameters()))
        )
    with using(backend):
        for _ in range(2):
            ours(x).square().sum().backward()
            theirs(x).square().sum().backward()
            peer.step()
            peer.zero_grad()
    assert set(alive) == {0}  # each gradient is freed before the next one is complete
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(mine, other, rtol=0, atol=1e-5)
    again = BackwardAdamW(ours.parameters(), **OPTIONS)
    again.load_state_dict(inside.state_dict())
    inside.remove()
    again.remove()
    ours(x).sum().backward()
    assert ours[0].weight.grad is not None
    with pytest.raises(UserError, match="1 states for 4 parameters"):
        again.load_state_dict(inside.state_dict()[:1])


def test_options_without_a_kernel_are_refused():
    with pytest.raises(UserError, match="FusedAdamW has no amsgrad: use"):
        FusedAdamW(parameters(torch.float32), amsgrad=True)
    with pytest.raises(UserError, match="lr is a tensor"):
        FusedAdamW(parameters(torch.float32), lr=torch.tensor(0.1))
