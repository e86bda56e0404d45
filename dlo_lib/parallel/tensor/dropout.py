"""Random numbers that differ between the ranks of tensor parallelism, for dropout on different activations.

The ranks of a tensor-parallel group have equal states of the random generator, so dropout on activations that
all of them hold drops the same elements. On activations that are cut (heads of attention, parts of the
sequence) equal masks would drop the same elements of every part, so the masks must differ.

One number from the common generator and the rank seed a temporary generator state. The common state remains
equal on all ranks, and activation checkpointing, which restores the common state, repeats the masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dlo_lib.parallel.tensor.exchange import TensorGroup


@contextmanager
def random_of_rank(device: torch.device, rank: int) -> Iterator[None]:
    """A context in which the random numbers on the CPU and on ``device`` depend on ``rank``. Afterwards, the
    random states are those before the context, advanced by one number."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + rank)
        yield


def random_of_rank_between(first: nn.Module, last: nn.Module, rank: int) -> None:
    """Let the random numbers after each forward of ``first`` and before the next one of ``last`` depend on
    ``rank``, while the modules are in training mode. They are modules of one forward, in this order."""
    opened: list[AbstractContextManager[None]] = []

    def start(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        opened.clear()  # a forward that an error has ended
        if module.training:
            opened.append(random_of_rank(out.device, rank))
            opened[-1].__enter__()

    def stop(*_: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    first.register_forward_hook(start)
    last.register_forward_pre_hook(stop)


class ShardedDropout(nn.Module):
    """Calls ``inner``, a dropout, with random numbers that differ between the ranks of ``group``."""

    def __init__(self, inner: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = self.inner(x)
            return out
        with random_of_rank(x.device, self.group.rank):
            out = self.inner(x)
            return out
