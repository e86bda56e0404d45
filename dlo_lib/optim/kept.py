"""Try something with a model and its optimiser, and have both back as they were: values, gradients, modes, and the random states.

Values are copied aside and copied back in place, so that who holds a parameter (DDP's buckets, an optimiser, a compiled graph) holds it
still. Cost: a copy of parameters, buffers, gradients and optimiser state, on their devices.
"""

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
class Kept:
    """Copies of all parameters and buffers, in order, and of the optimiser's state dict."""

    values: list[Tensor]
    optimizer: dict[str, Any]


def taken(model: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    """Copies of what steps change."""
    return Kept([value.detach().clone() for value in _values(model)], copy.deepcopy(optimizer.state_dict()))


def put_back(kept: Kept, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same values again; as often as wanted."""
    with torch.no_grad():
        for value, before in zip(_values(model), kept.values, strict=True):
            value.copy_(before)
    optimizer.load_state_dict(copy.deepcopy(kept.optimizer))  # which would go on to use the tensors it is given


@contextmanager
def as_it_was(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, the model trains (``model.train()``); afterwards, or after an error, nothing has happened."""
    kept = taken(model, optimizer)
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    modes = {module: module.training for module in model.modules()}
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        put_back(kept, model, optimizer)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        for module, mode in modes.items():
            module.training = mode
        random.setstate(python)
        np.random.set_state(numpy)


def _values(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
