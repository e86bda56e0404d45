"""The training state in this process: bytes of all parameters, their gradients and the optimisers' state; and
a file that can hold the state of an optimiser.

It reads the objects that are alive, so the measured code needs no change. Memory that two tensors share
counts once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state() -> dict[str, int]:
    """Bytes of "weights", "gradients" and "optimizer" that this process holds now."""
    gc.collect()
    alive = gc.get_objects()
    parameters = [thing for thing in alive if issubclass(type(thing), nn.Parameter)]
    optimizers = [thing for thing in alive if issubclass(type(thing), torch.optim.Optimizer)]
    kept = [
        value
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _bytes(kept),
    }


class StateFile:
    """A file that is mapped into memory, with room for fp32 tensors."""

    def __init__(self, file: str, nbytes: int) -> None:
        self.file = file
        self.numbers = torch.from_file(file, shared=True, size=nbytes // 4)

    def move_here(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters and moments of ``optimizer`` into the file."""
        offset = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                moments = [value for value in optimizer.state[parameter].values() if value.dim()]
                for tensor in (parameter, *moments):
                    place = self.numbers[offset : offset + tensor.numel()].view(tensor.shape)
                    tensor.data = place.copy_(tensor.data)
                    offset += tensor.numel()

    def write_to_disk(self) -> None:
        """Return when the disk has the file."""
        with open(self.file, "rb+") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def file_for(nbytes: int) -> Iterator[StateFile]:
    """A temporary file of this size, removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield StateFile(str(Path(folder) / "state"), nbytes)
