"""ZeRO on 1 to 4 ranks learns what one process learns from all the data: losses, gradients and parameters
within 1e-10 in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.parallel import DDP
from dlo_lib.parallel.sharding.sharded_grad import RemoteGrad
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer
from dlo_lib.parallel.zero.flat_params import PartitionBy
from tests.parallel.twin import (
    VOCAB,
    History,
    adamw,
    assert_same,
    from_every_rank,
    gradients,
    llama,
    steps_of,
    trained_alone,
    trained_on_ranks,
)


class Odd(nn.Module):
    """Tied ends, frozen, never and sometimes used parameters, a number, and sizes that no
    number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(5, 3)
        self.embedding = nn.Embedding(VOCAB, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.sometimes = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.head = nn.Linear(7, VOCAB)
        self.head.weight = self.embedding.weight
        self.register_buffer("gain", torch.randn(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embedding(tokens) * self.gain) * self.scale
        if len(tokens) > 1:
            x = x + self.sometimes(x)
        return self.head(x)


def sharded_adamw(model: nn.Module, **options) -> ShardedOptimizer:
    return ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, bucket_bytes=20_000, **options
    )


@dataclass(frozen=True)
class Stage1:
    """Behind DDP, which leaves whole gradients everywhere."""

    make: Callable[..., ShardedOptimizer] = sharded_adamw

    def wrap(self, module: nn.Module) -> tuple[nn.Module, ShardedOptimizer]:
        model = DDP(module, bucket_bytes=20_000, first_bucket_bytes=1_000, find_unused_parameters=True)
        return model, self.make(module)

    @property
    def sync_each(self) -> bool:
        return False

    def whole_gradients(
        self, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        return gradients(module)


@dataclass(frozen=True)
class Stage2:
    """Gradients in shards; put together with nothing of the library's: every rank's pieces as objects."""

    make: Callable[..., ShardedOptimizer] = sharded_adamw
    split: PartitionBy = PartitionBy.ELEMENTS
    sync_each: bool = False

    def wrap(self, module: nn.Module) -> tuple[nn.Module, ShardedOptimizer]:
        model = ShardedDDP(module, split=self.split, bucket_bytes=20_000, find_unused_parameters=True)
        return model, self.make(model, partition=model.partition)

    def whole_gradients(
        self, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        assert isinstance(optimizer, ShardedOptimizer)
        held = [param.grad for param in module.parameters() if param.grad is not None]
        assert all(isinstance(grad, RemoteGrad) and grad.untyped_storage().nbytes() == 0 for grad in held)
        names = {param: name for name, param in module.named_parameters()}
        mine = {
            (names[piece.param], piece.start): piece.shard.grad.reshape(-1)
            for piece in optimizer.pieces()
            if piece.shard.grad is not None
        }
        parts: dict[str, dict[int, Tensor]] = {}
        for its in from_every_rank(mine):
            for (name, start), part in its.items():
                parts.setdefault(name, {})[start] = part
        shapes = {name: param.shape for name, param in module.named_parameters()}
        return {
            name: torch.cat([held[start] for start in sorted(held)]).view(shapes[name])
            for name, held in parts.items()
        }


def on_ranks(
    world_size: int, build: Callable[[], nn.Module], stage: Stage1 | Stage2, count: int = 2, **how: Any
) -> list[History]:
    ranks = trained_on_ranks(world_size, build, stage, count, **how)
    for history, (name, value) in itertools.product(ranks[1:], ranks[0].parameters.items()):
        assert torch.equal(history.parameters[name], value), "ranks drift apart"
    return ranks


def assert_same_parameters(ranks: list[History], twin: History) -> None:
    for history in ranks:
        torch.testing.assert_close(history.parameters, twin.parameters, rtol=0, atol=1e-10)


@pytest.mark.parametrize("stage", [Stage1(), Stage2()], ids=["1", "2"])
@pytest.mark.parametrize(("world_size", "count"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 1)])
def test_a_tied_llama(world_size, count, stage):
    steps = steps_of(world_size, count)
    twin = trained_alone(llama, world_size, count, 0.5, torch.float64, steps=steps)
    assert max(twin.norms) > 0.5, "nothing was clipped"
    ranks = on_ranks(world_size, llama, stage, count=count, steps=steps)
    assert_same(ranks, twin, 1e-10)
    assert_same_parameters(ranks, twin)


@pytest.mark.parametrize("stage", [Stage1(), Stage2()], ids=["1", "2"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tied_frozen_unused_and_uneven_parameters(world_size, stage):
    twin = trained_alone(Odd, world_size, 2, 0.05, torch.float64)
    assert max(twin.norms) > 0.05, "nothing was clipped"
    ranks = on_ranks(world_size, Odd, stage, max_norm=0.05)
    assert_same(ranks, twin, 1e-10)
    assert_same_parameters(ranks, twin)
    assert not any("never" in name or "frozen" in name for step in ranks[0].gradients for name in step)


def test_gradients_reduced_after_each_micro_batch():
    ranks = on_ranks(2, llama, Stage2(sync_each=True), count=3)
    assert_same(ranks, trained_alone(llama, 2, 3, 0.5, torch.float64), 1e-10)


def adafactor(model: nn.Module, **options) -> torch.optim.Optimizer:
    if options:
        return ShardedOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.02, **options)
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


def test_whole_parameters_and_their_gradients_dealt_out():
    twin = trained_alone(Odd, 3, 2, 0.05, torch.float64, adafactor)
    ranks = on_ranks(3, Odd, Stage2(adafactor, PartitionBy.PARAMETERS), max_norm=0.05)
    assert_same(ranks, twin, 1e-10)
    assert_same_parameters(ranks, twin)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.05}),
    *([(torch.optim.Muon, {"lr": 0.05})] if hasattr(torch.optim, "Muon") else []),  # from torch 2.9 on
]


class Matrices(nn.Module):
    """Parameters for every optimiser, also for Muon, which takes only matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 11, bias=False), nn.Linear(11, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_any_optimiser_steps_as_if_it_were_not_sharded():
    def trained() -> None:
        for kind, options in OPTIMIZERS:
            torch.manual_seed(0)
            module, twin = Matrices().double(), Matrices().double()
            twin.load_state_dict(module.state_dict())
            sharded = ShardedOptimizer(module.parameters(), kind, bucket_bytes=200, **options)
            alone = kind(twin.parameters(), **options)
            for _ in range(4):
                x = torch.randn(4, 6, dtype=torch.float64)
                for model, optimizer in ((module, sharded), (twin, alone)):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
            difference = max(
                (mine - its).abs().max().item() for mine, its in zip(module.parameters(), twin.parameters())
            )
            assert difference < 1e-12, f"{kind.__name__} is off by {difference}"

    run_ranks(trained, 3)


def test_the_update_in_fp32_is_the_unsharded_one_bit_for_bit():
    def trained() -> None:
        torch.manual_seed(0)
        module, twin = llama(), llama()
        twin.load_state_dict(module.state_dict())
        sharded, alone = sharded_adamw(module), adamw(twin)
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            for mine, its in zip(module.parameters(), twin.parameters()):
                its.grad = torch.randn(its.shape, generator=random)
                mine.grad = its.grad.clone()
            sharded.step()
            alone.step()
        for mine, its in zip(module.parameters(), twin.parameters()):
            assert torch.equal(mine, its)

    run_ranks(trained, 3)


def offloaded(model: nn.Module, **options) -> ShardedOptimizer:
    return sharded_adamw(model, state_device=torch.device("cpu"), **options)


def test_stage_2_with_pieces_updated_elsewhere():
    twin = trained_alone(llama, 2, 2, 0.5, torch.float64)
    ranks = on_ranks(2, llama, Stage2(offloaded))
    assert_same(ranks, twin, 1e-10)
    assert_same_parameters(ranks, twin)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "stage",
    [Stage1(), Stage2(), Stage1(offloaded), Stage2(offloaded)],
    ids=["1", "2", "1 offloaded", "2 offloaded"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu_that_ranks_may_share_also_with_the_state_on_the_cpu(world_size, stage):
    twin = trained_alone(llama, world_size, 2, 0.5, torch.float64, device="cuda")
    ranks = on_ranks(world_size, llama, stage, device="cuda")
    assert_same(ranks, twin, 1e-10)
    assert_same_parameters(ranks, twin)
