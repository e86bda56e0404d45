"""Hooks of DDP that send less: PowerSGD is PyTorch's, ranks get one sum, and a resumed run is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.parallel import DDP
from dlo_lib.parallel.ddp import compressed_sums
from dlo_lib.parallel.ddp.comm_hooks import CommHook, for_torch, rounding_hook, sum_hook
from dlo_lib.parallel.ddp.compressed_sums import CompressedSum, OneBit, PowerSGD, TopK

STEPS = 7
BUCKETS: dict[str, Any] = {"bucket_bytes": 2000, "first_bucket_bytes": 2000}


def net() -> nn.Sequential:
    """Matrices of two shapes, one of them twice, a convolution, and vectors."""
    torch.manual_seed(0)
    layers = (
        nn.Conv1d(3, 8, 4),
        nn.Flatten(),
        nn.Linear(24, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Linear(16, 16),
    )
    return nn.Sequential(*layers).double()


def loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)).square().sum()


def trained(module: nn.Module, model: nn.Module, steps: range, trace_at: int = -1) -> int:
    """Take SGD steps; return the bytes of all-reduces of step ``trace_at``."""
    sent = 0
    for step in steps:
        module.zero_grad()
        with trace_collectives() as trace:
            loss(model, step).backward()
        if step == trace_at:
            sent = trace.bytes("all_reduce", dist.get_rank())
        with torch.no_grad():
            for param in module.parameters():
                param -= 1e-3 * param.grad
    return sent


def flat(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def assert_equal_on_all_ranks(module: nn.Module) -> None:
    every = [torch.empty_like(flat(module)) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat(module))
    assert all(torch.equal(every[0], other) for other in every)


def wave(*shape: int, dtype: torch.dtype = torch.float32, **_: object) -> Tensor:
    """The first factors, the same in both implementations."""
    size = torch.Size(shape).numel()
    return torch.arange(1, size + 1, dtype=torch.float64).mul_(1.7).sin_().view(shape).to(dtype)


def as_torch() -> None:
    """PowerSGD of one bucket equals that of PyTorch: ranks 1 to 3, with and without warm start."""
    draw, first = torch.randn, compressed_sums.first_factors
    for rank, warm, feedback in ((1, True, True), (3, True, True), (2, False, True), (2, True, False)):
        module, other = net(), net()
        hook = PowerSGD(rank, start=2, factor=1.5, warm_start=warm, error_feedback=feedback, eps=0.0)
        peer = DistributedDataParallel(other)
        state = powerSGD_hook.PowerSGDState(
            None,
            rank,
            2,
            1.5,
            use_error_feedback=feedback,
            warm_start=warm,
            batch_tensors_with_same_shape=True,
        )
        peer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        model = DDP(module, comm_hook=hook)
        compressed_sums.first_factors = lambda batch, columns, rank, seed, like: wave(
            batch, columns, rank, dtype=like.dtype
        )
        torch.randn = lambda *shape, **more: (
            draw(*shape, **more) if "generator" in more else wave(*shape, **more)
        )
        try:
            for step in range(STEPS):
                trained(module, model, range(step, step + 1))
                trained(other, peer, range(step, step + 1))
                torch.testing.assert_close(flat(module), flat(other), rtol=0, atol=1e-10)
        finally:
            torch.randn, compressed_sums.first_factors = draw, first
        assert_equal_on_all_ranks(module)


def test_power_sgd_is_that_of_pytorch_step_by_step():
    run_ranks(as_torch, 2)


HOOKS: dict[str, Callable[[], CompressedSum]] = {
    "power": lambda: PowerSGD(2),
    "batched": lambda: PowerSGD(4, batched=True),
    "power in 16 bits": lambda: PowerSGD(2, dtype=torch.bfloat16),
    "top-k": lambda: TopK(0.2),
    "one bit": lambda: OneBit(),
}


def every_hook() -> dict[str, int]:
    """Train with each hook, once whole and once resumed; return the bytes of the all-reduces of a step."""
    exact, sent = net(), {}
    trained(exact, DDP(exact, **BUCKETS), range(STEPS))
    moved = (flat(exact) - flat(net())).norm()
    for name, make in HOOKS.items():
        module, hook = net(), make()
        model = DDP(module, comm_hook=hook, **BUCKETS)
        trained(module, model, range(4))
        sent[name] = trained(module, model, range(4, STEPS), trace_at=5)
        assert_equal_on_all_ranks(module)
        assert (flat(module) - flat(exact)).norm() < 0.7 * moved, name
    whole = net()
    trained(whole, DDP(whole, comm_hook=TopK(1.0), **BUCKETS), range(STEPS))
    torch.testing.assert_close(flat(whole), flat(exact), rtol=0, atol=1e-12)
    return sent


def overflow() -> None:
    """After a step with an infinite gradient, and its skipped update, training continues."""
    for make in HOOKS.values():
        module = net()
        model = DDP(module, comm_hook=make(), **BUCKETS)
        trained(module, model, range(3))
        (loss(model, 3) * (torch.inf if dist.get_rank() == 0 else 1)).backward()
        trained(module, model, range(4, 6))
        assert torch.isfinite(flat(module)).all()


def resumed() -> None:
    """With one bucket; several are cut otherwise in the first step of a run."""
    for name in ("power", "power in 16 bits", "top-k"):
        module, hook, other = net(), HOOKS[name](), HOOKS[name]()
        model = DDP(module, comm_hook=hook)
        trained(module, model, range(4))
        again, without = copy.deepcopy(module), copy.deepcopy(module)
        other.load_state_dict(copy.deepcopy(hook.state_dict()))
        trained(module, model, range(4, STEPS))
        trained(again, DDP(again, comm_hook=other), range(4, STEPS))
        torch.testing.assert_close(flat(module), flat(again), rtol=0, atol=1e-10)
        trained(without, DDP(without, comm_hook=HOOKS[name]()), range(4, STEPS))
        assert (flat(module) - flat(without)).norm() > 1e-6


def hooks_and_overflows() -> dict[str, int]:
    overflow()
    resumed()
    return every_hook()


def test_every_hook_gives_all_ranks_one_sum_near_the_exact_one_and_survives_an_overflow():
    sent = run_ranks(hooks_and_overflows, 3)[0]
    assert sent["power in 16 bits"] < sent["power"] / 2
    assert sent["top-k"] == sent["one bit"] == 0  # they gather


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PowerSGD(0), "the rank of PowerSGD is 0"),
        (lambda: TopK(0.0), "the share of top-k is 0.0"),
        (lambda: OneBit(start=0), "because buckets are rebuilt after one step"),
    ],
)
def test_what_a_hook_cannot_do_is_one_line(make: Callable[[], object], says: str):
    with pytest.raises(UserError, match=says):
        make()


TORCH_HOOKS: dict[str, Callable[[], CommHook]] = {
    "sum": lambda: sum_hook,
    "fp16": lambda: rounding_hook(torch.float16),
    "PowerSGD": lambda: PowerSGD(2, start=2),
    "top-k": lambda: TopK(0.2, start=1),
    "one bit": lambda: OneBit(),
}


def in_both_ddps() -> None:
    """Each hook steps in PyTorch's DDP as in ours, with one bucket and, for hooks of parameters, with
    several."""
    for name, make in TORCH_HOOKS.items():
        for mebibytes in (25.0, 0.002):
            if name in ("one bit", "top-k") and mebibytes < 1:
                continue  # their sums depend on what shares a bucket
            ours_in, theirs_in = net(), net()
            size = int(mebibytes * 2**20)
            ours = DDP(ours_in, comm_hook=make(), bucket_bytes=size, first_bucket_bytes=size)
            theirs = DistributedDataParallel(theirs_in, bucket_cap_mb=mebibytes)
            theirs.register_comm_hook(None, for_torch(make(), theirs_in))
            for steps in (range(1), range(1, STEPS)):
                trained(ours_in, ours, steps)
                trained(theirs_in, theirs, steps)
                for one, other in zip(ours_in.parameters(), theirs_in.parameters(), strict=True):
                    torch.testing.assert_close(
                        one, other, rtol=0, atol=1e-9, msg=lambda text, k=name: f"{k}: {text}"
                    )


def test_a_hook_steps_in_pytorch_s_ddp_as_in_ours():
    run_ranks(in_both_ddps, 2)
