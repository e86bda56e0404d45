"""Lets code of others compute in float64, so that two orders of a sum agree to 1e-15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlo_lib.base.errors import UserError

SEED = 0


@contextmanager
def in_float64() -> Iterator[None]:
    """In the block, new floating-point tensors are float64, autocast does nothing, and random numbers begin
    with the same seed."""
    kept, kind = torch.get_default_dtype(), torch.amp.autocast_mode.autocast
    enter = kind.__init__

    def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        enter(self, *args, **kwargs)
        self._enabled = False

    torch.set_default_dtype(torch.float64)
    kind.__init__ = disabled  # type: ignore[method-assign]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            yield
    finally:
        kind.__init__ = enter  # type: ignore[method-assign]
        torch.set_default_dtype(kept)


def doubled(batch: Any) -> Any:
    """Return a batch whose floating-point tensors are float64."""
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def settle(model: nn.Module) -> None:
    """Switch dropout off.

    Raises:
        UserError: a parameter is not float64.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float64:
            said = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"parameter {name} is {said}: parity is proved in float64, the default dtype while build() "
                "runs, so do not cast the model there"
            )
