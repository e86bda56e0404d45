"""Loss scaling with optimisers whose step takes the scale and the overflow flag itself: after an overflow it
changes neither parameters nor state, whether the gradients were unscaled and clipped before or not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import FusedAdamW, using
from dlo_lib.optim.precision.loss_scaling import DynamicLossScaler
from tests.kernels.parity import BACKENDS, random

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(2500,), (3, 5), (0,)]
OVERFLOWS = [(), (0,), (2,), (0, 1, 3)]
"""The steps, from 0, in which a gradient is infinite or NaN."""


def device() -> str:
    return torch.get_default_device().type


def trained(make, overflows, *, clip, unscale, dtype=torch.float32, scaler=None):
    """Take five steps; return the optimiser, the parameters after each step, and the scales."""
    params = [nn.Parameter(random(*shape, seed=seed).to(dtype)) for seed, shape in enumerate(SHAPES)]
    optimizer = make(params)
    scaler = scaler or torch.amp.GradScaler(device(), init_scale=64.0, growth_interval=2)
    seen, scales = [], []
    for step in range(5):
        # scale() makes the scale, as in training, where it multiplies the loss.
        factor = scaler.scale(torch.ones(())).item()
        for number, param in enumerate(params):
            param.grad = (random(*param.shape, seed=100 * step + number) * factor).to(dtype)
        if step in overflows:
            params[1].grad[0, 1] = [float("inf"), float("nan")][step % 2]
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append([param.detach().clone() for param in params])
        scales.append(scaler.get_scale())
    return optimizer, seen, scales


def pytorchs(params):
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def ours(params):
    return FusedAdamW(params, **OPTIONS)


@pytest.mark.parametrize(("unscale", "clip"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("overflows", OVERFLOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_with_a_scaler_are_those_of_pytorch(backend, overflows, unscale, clip):
    with using(backend):
        optimizer, mine, scales = trained(ours, overflows, unscale=unscale, clip=clip)
    peer, theirs, peer_scales = trained(pytorchs, overflows, unscale=unscale, clip=clip)
    assert scales == peer_scales
    for step, (now, other) in enumerate(zip(mine, theirs)):
        for left, right in zip(now, other):
            assert left.isfinite().all(), f"step {step}"
            assert torch.allclose(left, right, rtol=0, atol=1e-6), f"step {step}"
    for param, other in zip(optimizer.param_groups[0]["params"], peer.param_groups[0]["params"]):
        left, right = optimizer.state[param], peer.state[other]
        assert left["step"] == right["step"] == 5 - len(overflows)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(left[name], right[name], rtol=0, atol=1e-6)
        assert torch.allclose(param.grad, other.grad, rtol=1e-6, equal_nan=True)  # divided by the scale


@pytest.mark.parametrize("make", [ours, pytorchs], ids=["ours", "pytorch's"])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_in_the_first_step_changes_nothing(backend, clip, make):
    with using(backend):
        optimizer, seen, scales = trained(make, range(5), unscale=clip, clip=clip)
    for params in seen:
        for seed, param in enumerate(params):
            assert torch.equal(param, random(*SHAPES[seed], seed=seed))
    assert scales == [32.0, 16.0, 8.0, 4.0, 2.0]
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert not state["exp_avg"].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_overflow_the_scale_changes_nothing(backend):
    with using(backend):
        _, scaled, _ = trained(ours, (), unscale=False, clip=False)
        _, plain, _ = trained(ours, (), unscale=False, clip=False, scaler=torch.amp.GradScaler(enabled=False))
    for now, other in zip(scaled, plain):
        for left, right in zip(now, other):
            assert torch.allclose(left, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scaler_of_the_course_skips_the_same_steps(backend):
    course = DynamicLossScaler(init_scale=64.0, growth_interval=2)
    with using(backend):
        _, mine, scales = trained(ours, (0, 3), unscale=True, clip=True, scaler=course)
        _, theirs, peers = trained(ours, (0, 3), unscale=True, clip=True)
    assert scales == peers
    for now, other in zip(mine, theirs):
        for left, right in zip(now, other):
            assert torch.allclose(left, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_flags_of_two_devices_add_up(backend):
    """The scaler passes the sum of the flags of the devices, which may be 2."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full_like(param, float("nan"))
    optimizer = ours([param])
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(2.0), torch.tensor([4.0])
    with using(backend):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))
    assert optimizer.state[param]["step"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_of_an_optimizer_that_is_not_fused_is_loaded_and_skips_an_overflow(backend):
    """Its step is on the CPU, and its groups say that it is not fused."""
    params = [nn.Parameter(random(4))]
    plain = torch.optim.AdamW(params, **OPTIONS)
    params[0].grad = random(4, seed=1)
    plain.step()
    before = params[0].detach().clone()
    optimizer = ours(params)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["fused"] is True
    step = optimizer.state[params[0]]["step"]
    assert (step.dtype, step.device, step.item()) == (torch.float32, params[0].device, 1)
    params[0].grad = torch.full((4,), float("inf"))
    scaler = torch.amp.GradScaler(device(), init_scale=4.0)
    scaler.scale(torch.ones(()))
    with using(backend):
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(params[0], before)
        params[0].grad = random(4, seed=2)
        again = copy.deepcopy(optimizer)
        optimizer.step()
        again.param_groups[0]["params"][0].grad = random(4, seed=2)
        again.step()
    assert optimizer.state[params[0]]["step"] == 2
    assert torch.equal(again.param_groups[0]["params"][0], params[0])


def test_a_state_with_an_option_without_a_kernel_is_refused():
    params = [nn.Parameter(random(4))]
    plain = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(UserError, match="FusedAdamW has no amsgrad"):
        ours(params).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_tables_of_the_kernel_follow_the_tensors(backend):
    """Parameters that get other memory, more or fewer gradients, or other moments, are updated there."""

    def run(make) -> list[torch.Tensor]:
        params = [nn.Parameter(random(1500, seed=seed)) for seed in range(3)]
        optimizer = make(params)
        for step in range(4):
            for number, param in enumerate(params):
                skipped = step == 1 and number == 0
                param.grad = None if skipped else random(1500, seed=10 * step + number)
            if step == 2:
                params[2].data = torch.cat([params[2].detach(), torch.ones(1)])[:-1].clone()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
        return [param.detach() for param in params]

    with using(backend):
        mine = run(ours)
    for left, right in zip(mine, run(pytorchs)):
        assert torch.allclose(left, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_pieces_of_flat_memory_are_not_aligned(backend):
    flat = random(2100)
    params = [nn.Parameter(flat[1:1030]), nn.Parameter(flat[1030:])]
    assert params[0].data_ptr() % 16
    exact = [nn.Parameter(param.detach().clone()) for param in params]
    mine, peer = ours(params), pytorchs(exact)
    for param, other in zip(params, exact):
        param.grad = random(*param.shape, seed=3)
        other.grad = param.grad.clone()
    with using(backend):
        mine.step()
    peer.step()
    for param, other in zip(params, exact):
        assert torch.allclose(param, other, rtol=0, atol=1e-6)
    assert flat[0] == random(2100)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sparse_gradient_is_refused(backend):
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with using(backend), pytest.raises(UserError, match="sparse gradient: use sparse=False"):
        ours(table.parameters()).step()


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("step", [0, 1, 6, 499, 9999, 10**6])
def test_corrections_keep_their_digits(step, backend):
    """1 - beta ** step loses most digits in fp32 where it is small, as in PyTorch's kernel on a GPU."""
    for betas in ((0.9, 0.999), (0.0, 0.0), (0.5, 0.99999)):
        mine, exact = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5, dtype=torch.float64))
        options = {"lr": 1.0, "betas": betas, "eps": 1e-8, "weight_decay": 0.0}
        optimizer, peer = FusedAdamW([mine], **options), torch.optim.AdamW([exact], **options)
        for param, its in ((mine, optimizer), (exact, peer)):
            param.grad = random(5).to(param.dtype)
            its.state[param] = {
                "step": torch.tensor(float(step), device=param.device if its is optimizer else "cpu"),
                "exp_avg": random(5, seed=1).to(param.dtype),
                "exp_avg_sq": random(5, seed=2).abs().to(param.dtype),
            }
        with using(backend):
            optimizer.step()
        peer.step()
        assert torch.allclose(mine.double(), exact, rtol=2e-6), betas
