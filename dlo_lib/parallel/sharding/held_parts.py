"""Optimisers of parameters that are parts, or some, of those of the model: tensor parallelism, expert
parallelism and pipelines.

    a part of a parameter      each element must be updated by itself:   AdamW, SGD, Lion
    some of the parameters     each parameter must be updated by itself: Adafactor and Muon too

The user creates the optimiser, so a hook on all optimisers compares it with the parameters at its first step,
before they change. FSDP (``fsdp.dtensors``) and ``zero.ShardedOptimizer`` do the same for theirs.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.sharding.elementwise import updates_elements, updates_params_alone


class Held(enum.Enum):
    """What a rank has of the parameters of the model."""

    PARTS = "parts of parameters"
    SOME = "the parameters of one rank"


_held = WeakTensorKeyDictionary()
"""What each parameter is, and the name of the form that has cut the model."""
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def mark_held(params: Iterable[Tensor], held: Held, form: str) -> None:
    """Record that a rank has ``held`` in ``params``. Optimisers that need more are refused.

    Args:
        params: parameters of this rank. What is recorded of a parameter already is kept.
        held: what they are.
        form: the name of the form of parallelism, for the message.
    """
    _check_optimisers()
    for param in params:
        _held.setdefault(param, (held, form))


@functools.cache
def _check_optimisers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _seen:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    forms = dict.fromkeys(_held[param] for param in params if param in _held)
    for held, form in forms:
        name, given = type(optimizer).__name__, f"{form} gives it {held.value}"
        if held is Held.PARTS and not updates_elements(optimizer):
            raise UserError(
                f"{name} does not update each element by itself, and {given}: use AdamW, SGD or another "
                "elementwise optimiser"
            )
        if held is Held.SOME and not updates_params_alone(optimizer):
            raise UserError(
                f"{name} does not update each parameter by itself, and {given}: use an optimiser of single "
                "parameters, such as AdamW or Adafactor"
            )
    _seen.add(optimizer)
