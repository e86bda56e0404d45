"""Parameters with less to share than there are ranks: numbers, single rows, nothing at all; and ranks
that own none of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from dlo_lib.parallel.sharding.sharded_grad import plain
from dlo_lib.parallel.zero import ShardedOptimizer
from tests.parallel.forms import Spread, ddp, fsdp, stage_1, stage_2


class Numbers(nn.Module):
    """Two numbers, a row, a column, and parameters of no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-0.5))
        self.blocks = nn.ModuleList([nn.Linear(3, 1), nn.Linear(1, 3, bias=False)])
        self.no_rows, self.no_columns = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gain + self.shift
        return x + self.no_rows.sum() + self.no_columns.sum()


def built(kind: type[nn.Module] = Numbers) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def hsdp(module: nn.Module) -> Spread:
    ranks = dist.get_world_size()
    mesh = ParallelMesh(Degrees(dp_replicate=0, dp_shard=ranks // 2 if ranks % 2 == 0 else ranks))
    model = FSDP(module, mesh.group_along("dp_shard"), replicas=mesh.group_along("dp_replicate"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


FORMS: list[Callable[[nn.Module], Spread]] = [ddp, stage_1, stage_2, fsdp, hsdp]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.tensor([[0.1, -0.2, 0.3]], dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return model.full_state_dict() if isinstance(model, FSDP) else model.module.state_dict()


def saved_by_all(folder: Path) -> None:
    for form in FORMS:
        model, optimizer = form(built())
        stepped(model, optimizer, 2)
        save_sharded(folder / form.__name__, model, optimizer)


def read_by_all(folder: Path) -> None:
    twin = built()
    stepped(twin, torch.optim.AdamW(twin.parameters(), lr=0.05), 4)
    for writer, reader in itertools.product(FORMS, FORMS):
        model, optimizer = reader(built())
        load_sharded(folder / writer.__name__, model, optimizer)
        stepped(model, optimizer, 2)
        for name, value in values(model).items():
            assert value.shape == twin.state_dict()[name].shape
            assert torch.allclose(value, twin.state_dict()[name], rtol=0, atol=1e-10), (
                f"{writer.__name__} to {reader.__name__}: {name}"
            )


def test_they_learn_and_go_through_the_checkpoints_of_every_form_to_every_other_on_other_ranks(tmp_path):
    run_ranks(saved_by_all, 3, tmp_path)
    run_ranks(read_by_all, 2, tmp_path)


class One(nn.Module):
    """All that one rank owns is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("form", [stage_2, fsdp])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_rank_that_owns_nothing_clips_with_the_others(form, dtype):
    def clipped() -> tuple[float, float]:
        model, optimizer = form(One().to(dtype))
        model(torch.full((2, 1), 1.0 + dist.get_rank(), dtype=dtype)).sum().backward()
        norm = model.clip_grad_norm_(1.5)
        shards = (
            [piece.shard for piece in optimizer.pieces()]
            if isinstance(optimizer, ShardedOptimizer)
            else model.parameters()
        )
        return norm.item(), sum(plain(shard.grad).sum().item() for shard in shards)

    (norm, first), (same, second) = run_ranks(clipped, 2)
    assert norm == same == pytest.approx(3.0)
    assert first + second == pytest.approx(1.5, rel=0.01)
    assert 0.0 in (first, second)


@pytest.mark.parametrize("form", [stage_2, fsdp])
def test_a_rank_that_owns_nothing_skips_the_step_that_overflows_elsewhere(form):
    def scaled() -> list[tuple[float, float]]:
        model, optimizer = form(One())
        scaler = ShardedGradScaler("cpu", dist.group.WORLD, init_scale=4.0)
        seen = []
        for factor in (torch.inf, 1.0):
            scaler.scale(model(torch.ones(1, 1)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((scaler.get_scale(), round(values(model)["weight"].item(), 2)))
        return seen

    assert run_ranks(scaled, 2) == [[(2.0, 2.0), (2.0, 1.95)]] * 2
