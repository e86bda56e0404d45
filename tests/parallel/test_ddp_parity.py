"""DDP on 1 to 4 ranks learns what one process learns from all the data: losses and gradients within 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama
from dlo_lib.optim import Precision, train_step
from dlo_lib.parallel import DDP
from tests.parallel.twin import STEPS, VOCAB, History, adamw, assert_same, gradients, llama, micro_batches, trained_alone


class Odd(nn.Module):
    """Frozen, never used and sometimes used parameters, buffers in use, sizes that fill no vector register."""

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


def trained_on_ranks(
    build: Callable[[], nn.Module], count: int, max_norm: float, dtype: torch.dtype, precision: Precision, device: str, options: dict
) -> History:
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # so that only the broadcast can make the replicas equal
    module = build().to(device, dtype)
    model = DDP(module, bucket_bytes=20_000, first_bucket_bytes=1_000, **options)
    optimizer = adamw(model)
    history = History([], [], [], {})
    optimizer.register_step_pre_hook(lambda *_: history.gradients.append(gradients(module)))
    for step in range(STEPS):
        pieces = micro_batches(step, rank, count, device)
        result = train_step(model, optimizer, pieces, max_norm=max_norm, group=model.group, precision=precision)
        history.losses.append(result.loss.item())
        history.norms.append(result.grad_norm.item())
    return history


def on_ranks(
    world_size: int,
    build: Callable[[], nn.Module],
    count: int,
    dtype: torch.dtype = torch.float64,
    precision: Precision = Precision.FP32,
    max_norm: float = 0.5,
    device: str = "cpu",
    **options: bool,
) -> list[History]:
    return run_ranks(trained_on_ranks, world_size, build, count, max_norm, dtype, precision, device, options)


@pytest.mark.parametrize(("world_size", "count"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 1)])
def test_a_tied_llama(world_size, count):
    twin = trained_alone(llama, world_size, count, 0.5, torch.float64)
    assert max(twin.norms) > 0.5, "nothing was clipped"
    assert_same(on_ranks(world_size, llama, count), twin, 1e-10)


@pytest.mark.parametrize(("world_size", "view"), [(1, True), (2, True), (3, True), (4, True), (1, False), (3, False)])
def test_frozen_unused_and_sometimes_used_parameters(world_size, view):
    twin = trained_alone(Odd, world_size, 2, 0.05, torch.float64)
    assert max(twin.norms) > 0.05, "nothing was clipped"
    ranks = on_ranks(world_size, Odd, 2, max_norm=0.05, gradient_as_bucket_view=view, find_unused_parameters=True)
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
    """With more ranks than GPUs it is gloo that reads and writes the GPU's memory: a missing wait between streams shows."""
    twin = trained_alone(llama, world_size, 2, 0.5, torch.float64)
    assert_same(on_ranks(world_size, llama, 2, device="cuda", keep_buckets=keep), twin, 1e-10)
