"""What a process holds of a model's state: bytes of all parameters, of their gradients, and of what optimisers keep, by looking at what is alive.

Nothing is asked of the code that is measured. Memory that two tensors share counts once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

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
        value for optimizer in optimizers for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _bytes(kept),
    }
