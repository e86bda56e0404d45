"""What an operation does with a gradient of which a rank holds a part: the reason why a result of one rank is
right or wrong.

    elementwise, or a view of all elements    right: the result is a part as well
    a selection, as ``gradient[0]``           right for its elements; its norm would be one of a rank
    a new tensor, as ``zeros_like``           right: it has no element of the gradient
    no tensor, as ``shape`` or ``tolist``     right: about this rank
    everything else                           wrong, because it mixes elements of several ranks

Whether an operation of PyTorch is elementwise is a tag of its operator, so that new ones are known as well.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import torch


class Effect(enum.Enum):
    """What the result of an operation is, if it has a part of a gradient among its arguments."""

    PART = enum.auto()
    VIEW = enum.auto()
    """A part with another shape."""
    SELECTION = enum.auto()
    PLAIN = enum.auto()
    """It is right to leave the result a plain tensor."""
    MIXED = enum.auto()


_NAMES = {
    Effect.PART: """
        __floordiv__ __ipow__ __pow__ __rdiv__ __rfloordiv__ __rpow__ __rtruediv__ __truediv__ bfloat16
        contiguous cpu cuda data detach double float half isfinite isneginf isposinf real to type
    """,
    Effect.VIEW: """
        H T flatten mH mT movedim permute ravel reshape reshape_as squeeze swapaxes swapdims t transpose
        unflatten unsqueeze view view_as
    """,
    Effect.SELECTION: """
        __getitem__ __iter__ __reversed__ argwhere chunk diag diagonal expand expand_as gather index_select
        masked_select narrow select split split_with_sizes take tensor_split tril triu unbind
    """,
    Effect.PLAIN: """
        empty_like full_like isclose new new_empty new_full new_ones new_tensor new_zeros ones_like
        rand_like randint_like randn_like zeros_like
        __setitem__ _foreach_copy_ _foreach_zero_ bernoulli_ copy_ detach_ fill_ index_fill_ masked_fill_
        normal_ pin_memory record_stream requires_grad_ resize_ resize_as_ retain_grad set_ share_memory_
        uniform_ zero_ grad
    """,
}
_EFFECTS = {name: effect for effect, names in _NAMES.items() for name in names.split()}


class Operation(NamedTuple):
    """A function that ``__torch_function__`` receives: its name, its effect, and whether it writes to an
    argument."""

    name: str
    effect: Effect
    writes: bool


@functools.cache
def operation(func: Any) -> Operation:
    """Return what ``func`` does.

    Unknown functions are ``MIXED``, which concerns only those that return new tensors or write to one.
    """
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):  # of an attribute
        name = str(getattr(func.__self__, "__name__", name))
    return Operation(name, _effect(name), writes=name[-1] == "_" != name[-2:-1])


def _effect(name: str) -> Effect:
    if name in _EFFECTS:
        return _EFFECTS[name]
    if name.startswith("_fused_"):  # the optimisers of PyTorch, which are elementwise
        return Effect.PLAIN
    operator = name.removeprefix("_foreach_").strip("_")
    for spelled in (operator, operator[1:] if name.startswith("__") else operator):  # __radd__, __iadd__
        packet = getattr(torch.ops.aten, spelled, None)
        if packet is not None:
            tags = [getattr(packet, overload).tags for overload in packet.overloads()]
            return Effect.PART if any(torch.Tag.pointwise in found for found in tags) else Effect.MIXED
    return Effect.MIXED
