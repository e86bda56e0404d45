"""Loss scaling of sharded optimisers whose update is fused: after an overflow on one rank, no rank changes
parameters or state, with clipping and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.kernels import FusedAdamW
from dlo_lib.launch import run_ranks
from dlo_lib.optim.precision import MasterWeights
from dlo_lib.optim.step import clip_grad_norm
from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer
from dlo_lib.parallel.zero.flat_params import PartitionBy
from tests.parallel.forms import Spread

BROKEN = (0, 2)
"""The steps with a gradient that is not finite, on the last rank."""
Kind = Callable[..., torch.optim.Optimizer]


class FusedInPyTorch(torch.optim.AdamW):
    """A class, as a sharded optimiser needs one."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{**options, "fused": True})


KINDS = [FusedAdamW, FusedInPyTorch]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def ddp(kind: Kind) -> Spread:
    model = DDP(Net())
    return model, kind(model.parameters(), lr=0.05)


def stage_1(kind: type[torch.optim.Optimizer]) -> Spread:
    model = DDP(Net())
    return model, ShardedOptimizer(model.parameters(), kind, lr=0.05)


def stage_2(kind: type[torch.optim.Optimizer]) -> Spread:
    by = PartitionBy.ELEMENTS if kind is FusedAdamW else PartitionBy.PARAMETERS
    model = ShardedDDP(Net(), split=by)
    return model, ShardedOptimizer(model.parameters(), kind, partition=model.partition, lr=0.05)


def fsdp(kind: Kind) -> Spread:
    model = FSDP(Net())
    return model, kind(model.parameters(), lr=0.05)


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, rank: int, last: int, clip: bool
):
    """Take four steps; return the scale after each."""
    scales = []
    for step in range(4):
        x = torch.randn(2, 7, generator=torch.Generator().manual_seed(step))
        factor = torch.inf if step in BROKEN and rank == last else 1.0
        scaler.scale(model(x).square().sum() * factor).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def alone(clip: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The steps that are not skipped, of one process and PyTorch's optimiser, which is not fused."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return stepped(model, optimizer, scaler, 0, 0, clip), model.state_dict()


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("form", [ddp, stage_1, stage_2, fsdp])
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_rank_skips_the_fused_step_of_all(kind, form, clip):
    def trained() -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = form(kind)
        scaler = ShardedGradScaler("cpu", dist.group.WORLD, init_scale=8.0)
        scales = stepped(model, optimizer, scaler, dist.get_rank(), dist.get_world_size() - 1, clip)
        whole = model.full_state_dict() if isinstance(model, FSDP) else model.module.state_dict()
        return scales, {name: value.clone() for name, value in whole.items()}

    peer_scales, peer = alone(clip)
    for scales, values in run_ranks(trained, 2):
        assert scales == peer_scales == [4.0, 4.0, 2.0, 2.0]
        for name, value in values.items():
            assert torch.allclose(value, peer[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_with_a_fused_update_skip_an_overflow(kind, clip):
    model = Net().bfloat16()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = MasterWeights(model.parameters(), lambda groups: kind(groups, lr=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (torch.inf, 1.0):
        scaler.scale(model(torch.ones(2, 7).bfloat16()).square().sum() * factor).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(param, old) for param, old in zip(model.parameters(), before)]
        assert all(changed) if factor == 1.0 else not any(changed)
        assert all(param.isfinite().all() for param in model.parameters())
