"""Gives storage to the parameters and buffers of modules that were built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Values = Callable[[nn.Parameter], Tensor]
"""Returns the value of a parameter or buffer on the meta device."""


def materialize(
    modules: Iterable[nn.Module],
    values: Values | None,
    device: torch.device | None,
) -> None:
    """Replace every parameter by a new one with storage on this rank. A parameter that several modules share
    remains shared.

    Args:
        modules: the modules that this rank holds.
        values: returns the value of a parameter; None for the values of the modules.
        device: the device of the new parameters; None for that of the values.
    """
    new: dict[int, nn.Parameter] = {}
    for outer in modules:
        for module in outer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in new:
                    value = parameter.detach() if values is None else values(parameter)
                    value = value.to(device) if device is not None else value
                    new[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                setattr(module, name, new[id(parameter)])


def materialize_buffers(module: nn.Module, values: Values, device: torch.device | None) -> None:
    """Give storage to the buffers of ``module`` that are on the meta device. Buffers are not cut or sharded.

    Args:
        module: the module.
        values: returns the value of a parameter or buffer.
        device: the device of the new buffers; None for that of the values.
    """
    for inner in module.modules():
        for name, buffer in list(inner.named_buffers(recurse=False)):
            if buffer.is_meta:
                inner._buffers[name] = values(buffer).to(device)  # type: ignore[arg-type]
