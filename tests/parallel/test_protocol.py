"""Every wrapper keeps the protocol, and says truly what its rank holds: the parts of all ranks, put
together, are the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.parallel import DDP, FSDP, ShardedDDP, ShardedOptimizer
from dlo_lib.parallel.protocol import (
    FlatRange,
    ParallelModel,
    ParamShard,
    SplitDim,
    local_optimizer,
    stepped_shards,
)


class Net(nn.Module):
    """Tied ends, a number, rows that no number of ranks divides, and a matrix in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(x))) * self.scale + self.turned.sum()


def put_together(shards: list[ParamShard]) -> dict[str, Tensor]:
    """The parameters from what each rank says it has, on every rank, with nothing of the library's."""
    mine = [(shard.name, shard.shape, shard.strides, _plain(shard), shard.param.detach()) for shard in shards]
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    whole: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    for name, shape, strides, placement, part in itertools.chain(*everyones):
        if placement is None:
            whole[name] = part
        elif placement == "rows":
            rows.setdefault(name, []).append(part)
            whole[name] = torch.cat(rows[name])
        else:
            if name not in whole:
                whole[name] = torch.empty_strided(shape, strides).fill_(torch.nan)
            # sent to itself, a tensor may lose its strides
            laid_out = torch.empty_strided(part.shape, part.stride()).copy_(part)
            whole[name].as_strided((part.numel(),), (1,), placement).copy_(
                laid_out.as_strided((part.numel(),), (1,), 0)
            )
    shapes = {name: shape for name, shape, *_ in itertools.chain(*everyones)}
    return {name: value.view(shapes[name]) if name in rows else value for name, value in whole.items()}


def _plain(shard: ParamShard) -> str | int | None:
    """The placement without its group: whole, rows, or from which element on."""
    if not shard.placement:
        return None
    (at,) = shard.placement
    assert at.dim == 0 if isinstance(at, SplitDim) else True
    return "rows" if isinstance(at, SplitDim) else at.start


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def ddp(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DDP(module)
    return model, adamw(model)


def stage_1(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DDP(module)
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW)


def stage_2(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ShardedDDP(module)
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=model.partition)


def fsdp(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FSDP(module)
    return model, adamw(model)


FORMS: list[Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]] = [ddp, stage_1, stage_2, fsdp]


def parts_are_the_whole() -> None:
    for form in FORMS:
        torch.manual_seed(3)
        module = Net()
        expected = {name: param.detach().clone() for name, param in module.named_parameters()}
        model, optimizer = form(module)
        assert isinstance(model, ParallelModel), form.__name__
        assert [type(inner) for inner in model.unwrapped()] == [Net]
        for shards in (model.shards(), stepped_shards(model, optimizer)):
            assert len({shard.name for shard in shards}) == len(shards)
            for name, value in put_together(shards).items():
                assert torch.equal(value, expected[name]), (form.__name__, name)
        stepped = {
            param
            for group in local_optimizer(optimizer).param_groups
            for param in group["params"]
            if param.numel()
        }
        assert {shard.param for shard in stepped_shards(model, optimizer) if shard.param.numel()} == stepped
        cut = any(
            isinstance(at, FlatRange) for shard in stepped_shards(model, optimizer) for at in shard.placement
        )
        assert cut == (form in (stage_1, stage_2))


def test_the_parts_that_ranks_say_they_hold_are_the_whole_model():
    run_ranks(parts_are_the_whole, 3)
