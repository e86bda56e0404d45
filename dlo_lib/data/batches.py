"""Stack sequences into micro-batches and copy them to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dlo_lib.data.documents import TokenDataset
from dlo_lib.data.sampler import PADDING


def collate(dataset: TokenDataset, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (batch, seq) int64 on the CPU.

    The index ``PADDING`` gives a sequence whose targets are all ignored.
    """
    inputs, targets = zip(*(dataset.empty() if index == PADDING else dataset[index] for index in indices))
    return torch.stack(inputs), torch.stack(targets)


def batches(
    dataset: TokenDataset, index_batches: Iterable[Sequence[int]], device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches of inputs and targets, each (batch, seq) int64 on ``device``.

    ``index_batches`` is a sampler, for the rest of its epoch, or ``sampler.endless()``.
    """
    device = torch.device(device)
    for indices in index_batches:
        inputs, targets = collate(dataset, indices)
        if device.type == "cuda":
            # The copy from pinned memory is asynchronous and overlaps with the previous step.
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
