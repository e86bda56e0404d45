"""DDP on 1 to 4 ranks learns what one process learns from all the data: losses and gradients
within 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.models import Llama
from dlo_lib.optim import Precision
from dlo_lib.parallel import DDP
from tests.parallel.twin import (
    VOCAB,
    History,
    adamw,
    assert_same,
    gradients,
    llama,
    steps_of,
    trained_alone,
    trained_on_ranks,
)


class Odd(nn.Module):
    """Frozen, never used and sometimes used parameters, buffers in use, sizes that
    fill no vector register."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(5, 3)
        self.embedding = nn.Embedding(VOCAB, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.sometimes = nn.Linear(7, 7)
        self.hidden = nn.Linear(7, 11)
        self.head = nn.Linear(11, VOCAB, bias=False)
        self.register_buffer("gain", torch.randn(7))
        self.register_buffer("offset", torch.randn(7), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embedding(tokens)) * self.gain + self.offset
        if len(tokens) > 1:
            x = x + self.sometimes(x)
        return self.head(torch.tanh(self.hidden(x)))


@dataclass(frozen=True)
class Ddp:
    """Gradients are whole on every rank."""

    options: dict[str, bool] = field(default_factory=dict)
    sync_each: bool = False

    def wrap(self, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DDP(module, bucket_bytes=20_000, first_bucket_bytes=1_000, **self.options)
        return model, adamw(model)

    def whole_gradients(
        self, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        return gradients(module)


def on_ranks(
    world_size: int, build: Callable[[], nn.Module], count: int, options: dict | None = None, **how: Any
) -> list[History]:
    return trained_on_ranks(world_size, build, Ddp(options or {}), count, **how)


@pytest.mark.parametrize(("world_size", "count"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 1)])
def test_a_tied_llama(world_size, count):
    steps = steps_of(world_size, count)
    twin = trained_alone(llama, world_size, count, 0.5, torch.float64, steps=steps)
    assert max(twin.norms) > 0.5, "nothing was clipped"
    assert_same(on_ranks(world_size, llama, count, steps=steps), twin, 1e-10)


@pytest.mark.parametrize(
    ("world_size", "view"), [(1, True), (2, True), (3, True), (4, True), (1, False), (3, False)]
)
def test_frozen_unused_and_sometimes_used_parameters(world_size, view):
    twin = trained_alone(Odd, world_size, 2, 0.05, torch.float64)
    assert max(twin.norms) > 0.05, "nothing was clipped"
    ranks = on_ranks(
        world_size,
        Odd,
        2,
        max_norm=0.05,
        options={"gradient_as_bucket_view": view, "find_unused_parameters": True},
    )
    assert_same(ranks, twin, 1e-10)
    assert not any("never" in name or "frozen" in name for step in ranks[0].gradients for name in step)


def test_activation_checkpointing_on_ranks():
    def checkpointed() -> Llama:
        return llama(checkpointing=True)

    assert_same(on_ranks(2, checkpointed, 2), trained_alone(llama, 2, 2, 0.5, torch.float64), 1e-10)


def test_fp32_losses():
    twin = trained_alone(llama, 2, 2, 0.5, torch.float32)
    for history in on_ranks(2, llama, 2, dtype=torch.float32):
        assert history.losses == pytest.approx(twin.losses, rel=0, abs=1e-5)


def test_bf16_stays_near_fp32_and_every_rank_sees_the_same():
    twin = trained_alone(llama, 3, 2, 0.5, torch.float32)
    ranks = on_ranks(3, llama, 2, dtype=torch.float32, precision=Precision.BF16)
    for history in ranks:
        assert history.losses == pytest.approx(twin.losses, rel=0.02)
        for mine, its in zip(history.gradients, ranks[0].gradients):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu_that_ranks_may_share(world_size, keep):
    """With more ranks than GPUs it is gloo that reads and writes the GPU's memory: a missing wait
    between streams shows."""
    twin = trained_alone(llama, world_size, 2, 0.5, torch.float64, device="cuda")
    assert_same(on_ranks(world_size, llama, 2, device="cuda", options={"keep_buckets": keep}), twin, 1e-10)
