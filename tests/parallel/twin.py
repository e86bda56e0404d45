"""The proof of parity, for every wrapper: ranks learn what the non-parallel twin learns from all the data.

The twin has one loss over the sequences of all ranks, one backward and one step, written out with nothing of
the library but the model. Ranks learn from unequal batches, some without a token to learn. A ``Wrapping``
says how a model is spread in a test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.optim import IGNORE_INDEX, Precision, train_step

STEPS, FEW = 10, 4
"""The steps of one case of each wrapper, and of the others. Sizes of batches repeat after 3 steps, and a
wrong gradient of one step changes everything from the next step on."""
SEQ, VOCAB = 6, 257

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class History:
    """Per step: the loss, the norm before clipping, and every gradient that the optimiser saw, whole; and the
    parameters at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def llama(checkpointing: bool = False) -> Llama:
    return Llama(model_config("tiny"), checkpointing=checkpointing)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def micro_batches(step: int, rank: int, count: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Unequal numbers of sequences and of tokens to learn; the second rank's first
    micro-batch has none at all."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    pairs = []
    for index in range(count):
        tokens = torch.randint(VOCAB, (1 + (step + rank + index) % 3, SEQ + 1), generator=random)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=random) < 0.2 + 0.2 * rank] = IGNORE_INDEX
        if rank == 1 and index == 0:
            targets[:] = IGNORE_INDEX
        pairs.append((inputs.to(device), targets.to(device)))
    return pairs


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.grad.cpu().clone() for name, param in model.named_parameters() if param.grad is not None
    }


def from_every_rank(
    mine: dict[Any, Tensor], group: dist.ProcessGroup | None = None
) -> list[dict[Any, Tensor]]:
    """What each rank of the group has, with torch's own gather: one object for all tensors, because each
    object costs two collectives. Arrays, because a tensor is pickled by ``torch.save``, which is slower."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        everyones, {key: tensor.cpu().numpy() for key, tensor in mine.items()}, group=group
    )
    return [{key: torch.from_numpy(array) for key, array in its.items()} for its in everyones]


@functools.cache  # tests of the same shape share a twin; they only read it
def trained_alone(
    build: Callable[[], nn.Module],
    world_size: int,
    count: int,
    max_norm: float,
    dtype: torch.dtype,
    make_optimizer: MakeOptimizer = adamw,
    device: str = "cpu",
    steps: int = FEW,
) -> History:
    torch.manual_seed(0)
    model = build().to(device, dtype)
    optimizer = make_optimizer(model)
    history = History([], [], [], {})
    for step in range(steps):
        pieces = [piece for rank in range(world_size) for piece in micro_batches(step, rank, count, device)]
        tokens = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in pieces)
        sums = [
            F.cross_entropy(
                model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            for inputs, targets in pieces
        ]
        loss = torch.stack(sums).sum() / tokens
        loss.backward()
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        history.losses.append(loss.item())
        history.gradients.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    history.parameters = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
    return history


def steps_of(world_size: int, count: int) -> int:
    """The steps of a tied Llama: more of them with 3 ranks and 3 micro-batches."""
    return STEPS if (world_size, count) == (3, 3) else FEW


class Wrapping(Protocol):
    """How a test spreads a model over ranks; sent to them by pickling."""

    @property
    def sync_each(self) -> bool:
        """Whether gradients are communicated after each micro-batch."""

    def wrap(self, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The wrapped module and its optimiser."""

    def whole_gradients(
        self, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """What the optimiser is about to step on, put together with nothing of the library's."""


def _trained(
    build: Callable[[], nn.Module],
    wrapping: Wrapping,
    count: int,
    max_norm: float,
    dtype: torch.dtype,
    precision: Precision,
    device: str,
    steps: int,
) -> History:
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # so that only a broadcast can make the ranks' parts fit together
    module = build().to(device, dtype)
    model, optimizer = wrapping.wrap(module)
    history = History([], [], [], {})
    optimizer.register_step_pre_hook(
        lambda *_: history.gradients.append(wrapping.whole_gradients(model, module, optimizer))
    )
    for step in range(steps):
        pieces = micro_batches(step, rank, count, device)
        result = train_step(
            model,
            optimizer,
            pieces,
            max_norm=max_norm,
            group=dist.group.WORLD,
            precision=precision,
            sync_each=wrapping.sync_each,
        )
        history.losses.append(result.loss.item())
        assert result.grad_norm is not None
        history.norms.append(result.grad_norm.item())
    history.parameters = {name: param.detach().cpu() for name, param in module.named_parameters()}
    return history


def trained_on_ranks(
    world_size: int,
    build: Callable[[], nn.Module],
    wrapping: Wrapping,
    count: int = 2,
    *,
    dtype: torch.dtype = torch.float64,
    precision: Precision = Precision.FP32,
    max_norm: float = 0.5,
    device: str = "cpu",
    steps: int = FEW,
) -> list[History]:
    """What each of ``world_size`` ranks sees in ``steps`` steps of ``count`` micro-batches."""
    return run_ranks(_trained, world_size, build, wrapping, count, max_norm, dtype, precision, device, steps)


def assert_same(ranks: list[History], twin: History, within: float) -> None:
    for history in ranks:
        assert len(history.losses) == len(twin.losses) >= FEW
        torch.testing.assert_close(history.losses, twin.losses, rtol=0, atol=within)
        torch.testing.assert_close(history.norms, twin.norms, rtol=0, atol=within)
        for mine, its in zip(history.gradients, twin.gradients, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=within)
