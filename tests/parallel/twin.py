"""The non-parallel twin and what it is compared with: one loss over everybody's sequences, one backward, one step.

It is written out with nothing of the library but the model. Ranks learn from unequal batches, some without a token to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.models import Llama, model_config
from dlo_lib.optim import IGNORE_INDEX

STEPS, SEQ, VOCAB = 10, 6, 257

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class History:
    """Per step: the loss, the norm before clipping, and every gradient that the optimiser saw, whole; and the parameters at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def llama(checkpointing: bool = False) -> Llama:
    return Llama(model_config("tiny"), checkpointing=checkpointing)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def micro_batches(step: int, rank: int, count: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Unequal numbers of sequences and of tokens to learn; the second rank's first micro-batch has none at all."""
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
    return {name: param.grad.cpu().clone() for name, param in model.named_parameters() if param.grad is not None}


def trained_alone(
    build: Callable[[], nn.Module],
    world_size: int,
    count: int,
    max_norm: float,
    dtype: torch.dtype,
    make_optimizer: MakeOptimizer = adamw,
) -> History:
    torch.manual_seed(0)
    model = build().to(dtype)
    optimizer = make_optimizer(model)
    history = History([], [], [], {})
    for step in range(STEPS):
        pieces = [piece for rank in range(world_size) for piece in micro_batches(step, rank, count)]
        tokens = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in pieces)
        sums = [
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            for inputs, targets in pieces
        ]
        loss = torch.stack(sums).sum() / tokens
        loss.backward()
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        history.losses.append(loss.item())
        history.gradients.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    history.parameters = {name: param.detach().clone() for name, param in model.named_parameters()}
    return history


def assert_same(ranks: list[History], twin: History, within: float) -> None:
    for history in ranks:
        assert len(history.losses) == len(twin.losses) == STEPS
        torch.testing.assert_close(history.losses, twin.losses, rtol=0, atol=within)
        torch.testing.assert_close(history.norms, twin.norms, rtol=0, atol=within)
        for mine, its in zip(history.gradients, twin.gradients, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=within)
