"""Save and restore a model and its optimiser: values, gradients, training modes and random number generators.

Values are restored in place, so references to the parameters (DDP's buckets, the optimiser, a compiled graph)
stay valid. Cost: a copy of parameters, buffers, gradients and optimiser state, on their devices."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SavedState:
    """Copies of all parameters and buffers, in order, and of the state dict of the optimiser."""

    values: list[Tensor]
    optimizer: dict[str, Any]


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> SavedState:
    """Copy all values that a training step changes."""
    return SavedState(
        [value.detach().clone() for value in _values(model)], copy.deepcopy(optimizer.state_dict())
    )


def restore_state(saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the saved values. The same state can be restored several times."""
    with torch.no_grad():
        for value, before in zip(_values(model), saved.values, strict=True):
            value.copy_(before)
    optimizer.load_state_dict(copy.deepcopy(saved.optimizer))  # the optimiser steps in place


@contextmanager
def preserved_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the model in training mode; restore all state at the end of the block, also after an exception."""
    saved = save_state(model, optimizer)
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    modes = {module: module.training for module in model.modules()}
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        restore_state(saved, model, optimizer)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        for module, mode in modes.items():
            module.training = mode
        random.setstate(python)
        np.random.set_state(numpy)


def _values(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
