"""The tensors in the arguments and results of modules: in containers, and in dataclasses.

PyTorch's pytree treats a dataclass as a leaf unless its class is registered.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with ``function(tensor)`` for each tensor in its containers and dataclasses.

    A dataclass is copied if one of its fields changes. Its ``__post_init__`` is not called.
    """

    def leaf(found: Any) -> Any:
        if isinstance(found, Tensor):
            return function(found)
        return _map_fields(function, found) if _is_dataclass(found) else found

    return tree_map(leaf, value, is_leaf=_is_dataclass)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the containers and dataclasses of ``value``, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    held = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    mapped = {name: map_tensors(function, content) for name, content in held.items()}
    if not any(_has_changed(mapped[name], content) for name, content in held.items()):
        return value
    changed = copy.copy(value)
    for name, content in mapped.items():
        if type(value).__dataclass_params__.frozen:
            object.__setattr__(changed, name, content)
        else:
            setattr(changed, name, content)
    return changed


def _has_changed(after: Any, before: Any) -> bool:
    return [id(tensor) for tensor in tensors_in(after)] != [id(tensor) for tensor in tensors_in(before)]
