"""FSDP on 1 to 4 ranks learns what one process learns from all the data: losses and gradients
within 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.models import Llama
from dlo_lib.models.llama import Block
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.fsdp.state_dict import fsdp_params_by_name
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from tests.parallel.twin import (
    VOCAB,
    History,
    adamw,
    assert_same,
    from_every_rank,
    llama,
    steps_of,
    trained_alone,
    trained_on_ranks,
)


class OddBlock(nn.Module):
    """A frozen matrix between trained ones, one that only some batches use, and sizes that no
    number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.sometimes = nn.Linear(7, 7)
        self.up = nn.Linear(7, 11)
        self.down = nn.Linear(11, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.frozen(torch.tanh(self.down(torch.tanh(self.up(x))))) * self.scale
        return x + self.sometimes(x) if len(x) > 1 else x


class Odd(nn.Module):
    """Tied ends, a parameter beside the blocks, one block used twice and one never, buffers,
    a wholly frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(7))
        self.embedding = nn.Embedding(VOCAB, 7)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.blocks[2].requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, VOCAB)
        self.head.weight = self.embedding.weight
        self.register_buffer("gain", torch.randn(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.gain + self.shift
        for index in (0, 1, 0, 2):
            x = self.blocks[index](x, mask=tokens)
        return self.head(self.norm(x))


def whole_gradients(model: FSDP) -> dict[str, Tensor]:
    """Gathered with nothing of FSDP's: every rank's part as an object."""
    by_name = fsdp_params_by_name(model.module, model.units)
    held = {name: by_name[name] for name, _ in model.module.named_parameters()}
    mine = {name: param.shard.grad for name, param in held.items() if param.shard.grad is not None}
    everyones = from_every_rank(mine, model.group)
    assert all(its.keys() == mine.keys() for its in everyones)
    return {name: torch.cat([its[name] for its in everyones]).view(held[name].whole.shape) for name in mine}


@dataclass(frozen=True)
class Fsdp:
    """Over all ranks, or with ``shard_size`` over groups of them that hold copies."""

    shard_size: int = 0
    sync_each: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def wrap(self, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        if not self.shard_size:
            model = FSDP(module, **self.options)
        else:
            mesh = ParallelMesh(Degrees(dp_replicate=0, dp_shard=self.shard_size))
            model = FSDP(
                module,
                mesh.group_along("dp_shard"),
                replicas=mesh.group_along("dp_replicate"),
                **self.options,
            )
        return model, adamw(model)

    def whole_gradients(
        self, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        assert isinstance(model, FSDP)
        return whole_gradients(model)


def on_ranks(
    world_size: int,
    build: Callable[[], nn.Module],
    count: int,
    *,
    shard_size: int = 0,
    sync_each: bool = False,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> list[History]:
    return trained_on_ranks(world_size, build, Fsdp(shard_size, sync_each, options or {}), count, **how)


@pytest.mark.parametrize(("world_size", "count"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 1)])
def test_a_tied_llama(world_size, count):
    steps = steps_of(world_size, count)
    twin = trained_alone(llama, world_size, count, 0.5, torch.float64, steps=steps)
    assert max(twin.norms) > 0.5, "nothing was clipped"
    assert_same(on_ranks(world_size, llama, count, options={"blocks": Block}, steps=steps), twin, 1e-10)


@pytest.mark.parametrize(
    ("world_size", "reshard"), [(1, True), (2, True), (3, True), (4, True), (1, False), (3, False)]
)
def test_tied_frozen_unused_shared_and_uneven_parameters(world_size, reshard):
    twin = trained_alone(Odd, world_size, 2, 0.05, torch.float64)
    assert max(twin.norms) > 0.05, "nothing was clipped"
    ranks = on_ranks(
        world_size,
        Odd,
        2,
        max_norm=0.05,
        options={"reshard_after_forward": reshard, "find_unused_parameters": True},
    )
    assert_same(ranks, twin, 1e-10)
    assert not any(
        "blocks.3" in name or "blocks.2" in name or "frozen" in name
        for step in ranks[0].gradients
        for name in step
    )


@pytest.mark.parametrize("reshard", [1, 2])
def test_units_of_which_a_larger_share_stays_between_forward_and_backward(reshard):
    assert_same(
        on_ranks(4, llama, 2, options={"reshard_after_forward": reshard}),
        trained_alone(llama, 4, 2, 0.5, torch.float64),
        1e-10,
    )


def test_gradients_reduced_after_each_micro_batch():
    assert_same(on_ranks(2, llama, 3, sync_each=True), trained_alone(llama, 2, 3, 0.5, torch.float64), 1e-10)


@pytest.mark.parametrize("shard_size", [1, 2])
def test_hybrid_sharding(shard_size):
    assert_same(
        on_ranks(4, llama, 2, shard_size=shard_size), trained_alone(llama, 4, 2, 0.5, torch.float64), 1e-10
    )


def test_activation_checkpointing_on_ranks():
    def checkpointed() -> Llama:
        return llama(checkpointing=True)

    assert_same(on_ranks(2, checkpointed, 2), trained_alone(llama, 2, 2, 0.5, torch.float64), 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu_that_ranks_may_share(world_size, reshard):
    """With more ranks than GPUs it is gloo that reads and writes the GPU's memory: a missing wait
    between streams shows."""
    twin = trained_alone(llama, world_size, 2, 0.5, torch.float64, device="cuda")
    assert_same(
        on_ranks(world_size, llama, 2, device="cuda", options={"reshard_after_forward": reshard}), twin, 1e-10
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("reshard", [True, False])
def test_shards_gradients_and_state_on_the_cpu_of_a_model_that_computes_elsewhere(device, reshard):
    """Without a GPU both are the CPU, and the path is the same."""
    twin = trained_alone(Odd, 2, 3, 0.05, torch.float64)
    options = {
        "shard_device": torch.device("cpu"),
        "reshard_after_forward": reshard,
        "find_unused_parameters": True,
    }
    assert_same(
        on_ranks(2, Odd, 3, max_norm=0.05, device=device, sync_each=True, options=options), twin, 1e-10
    )


def test_fp32_losses():
    twin = trained_alone(llama, 2, 2, 0.5, torch.float32)
    for history in on_ranks(2, llama, 2, dtype=torch.float32):
        assert history.losses == pytest.approx(twin.losses, rel=0, abs=1e-5)
