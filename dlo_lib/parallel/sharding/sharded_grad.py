"""Gradients that know that they are parts, so that PyTorch's own functions compute the norm of the whole.

``nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` call a few functions on the gradients. With plain
tensors each rank would get the norm of its shards, and would detect only the overflows of its shards. The
classes of this module compute these functions over all ranks:

    norms: torch.linalg.vector_norm, torch.norm, torch._foreach_norm          one all-reduce of the norms
    sum, mean, max, min, amax, amin, any, all                                 one or two of a scalar
    torch._amp_foreach_non_finite_check_and_unscale_                          one all-reduce of the flag

Elementwise functions compute on the part of this rank, and their results are parts as well: the norm of
``gradient.float()`` is that of the whole. Functions that mix elements of several ranks are refused
(``sharding.operations``). ``sharding.grad_functions`` defines the functions over all ranks.

A ``ShardedGrad`` is the part itself. A ``RemoteGrad`` stands in ``.grad`` of a whole parameter whose averaged
gradient is elsewhere, in the shards of ZeRO stage 2; it holds no memory.

The gradients of PyTorch's ``fully_shard`` are ``DTensor``s, which do the same for all operators. The classes
of this module cost less: a few microseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.sharding.operations import Effect, Operation, operation

OVER_RANKS: dict[Any, Callable[..., Any]] = {}
"""The functions that are computed over all ranks. ``grad_functions`` fills it."""
IN_PLACE: dict[Any, Callable[..., Any]] = {}
"""The functions that change the part of a ``RemoteGrad`` in place."""


@dataclass(frozen=True, eq=False)
class GradScope:
    """The ranks that hold the parts of a gradient.

    Attributes:
        groups: the groups, one for each mesh dimension, whose ranks hold different parts.
        device: the device on which the groups communicate.
        refusal: "", or the message of a ``UserError`` that the functions over all ranks raise.
        rows: whether the parts are rows, so that a sum over other dimensions than the first is one of a rank.
    """

    groups: Sequence[dist.ProcessGroup]
    device: torch.device
    refusal: str = ""
    rows: bool = False


class ShardedGrad(Tensor):
    """The part of a gradient that this rank holds; create it with ``mark``."""

    scope: GradScope

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OVER_RANKS:
            return OVER_RANKS[func](*args, **(kwargs or {}))
        does = operation(func)
        if does.effect is Effect.MIXED and (does.writes or (kwargs and "out" in kwargs)):
            raise UserError(mixes(does.name))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if does.writes or does.effect is Effect.PLAIN or not isinstance(result, Tensor | list | tuple):
            return result
        return _mark_results(result, args, kwargs, does)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return mark(plain_part(self), self.scope)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Another process receives the part as a plain tensor, because the ranks of the scope stay here."""
        return plain_part(self).__reduce_ex__(protocol)


def plain(grad: Tensor) -> Tensor:
    """Return the part of ``grad`` that this rank holds as a plain tensor with the same memory. A fake tensor
    stays one."""
    with torch._C.DisableTorchFunctionSubclass():
        return local_grad(grad).detach()


def plain_part(grad: Tensor) -> Tensor:
    """Return a copy of the part of ``grad`` that this rank holds, a plain tensor."""
    return plain(grad).clone()


def mark(grad: Tensor, scope: GradScope) -> Tensor:
    """Set the scope of ``grad`` and return it. A plain tensor becomes a ``ShardedGrad``, in place.

    A fake tensor, which has no values, stays as it is.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if type(grad) is Tensor:
            grad.__class__ = ShardedGrad
        if isinstance(grad, ShardedGrad | RemoteGrad):
            grad.scope = scope
    return grad


def _mark_results(result: Any, args: Any, kwargs: Any, does: Operation) -> Any:
    """Mark the new tensors of ``result`` as parts of the gradients among the arguments.

    Raises:
        UserError: there are new tensors, and the operation mixes elements of several ranks.
    """
    results = result if isinstance(result, list | tuple) else (result,)
    if not any(type(tensor) is Tensor for tensor in results):
        return result
    given: list[Any] = []
    for value in (*args, *(kwargs or {}).values()):
        given.extend(value) if isinstance(value, list | tuple) else given.append(value)
    known = {id(tensor) for tensor in given}
    new = [tensor for tensor in results if type(tensor) is Tensor and id(tensor) not in known]
    if not new:
        return result
    if does.effect is Effect.MIXED:
        raise UserError(mixes(does.name))
    parts = [tensor for tensor in given if isinstance(tensor, ShardedGrad)]
    each = len(parts) == len(new)  # a function of lists
    for number, tensor in enumerate(new):
        part = parts[number if each else 0]
        scope = part.scope
        if does.effect is Effect.SELECTION:
            scope = replace(scope, refusal=scope.refusal or _SELECTED)
        elif scope.rows and tensor.shape != part.shape:
            scope = replace(scope, rows=False)
        mark(tensor, scope)
    return result


_SELECTED = (
    "this is a selection from the rows of one rank, whose norm or sum concerns no whole gradient: "
    "take the norm of the gradient itself"
)


def mixes(name: str) -> str:
    """Return the message for a function of all elements that has no form over all ranks."""
    return (
        f"{name} mixes elements of a gradient of which this rank holds a part: use elementwise functions, or "
        "norms, sums, means and extrema of all elements, which are those of the whole gradient; "
        "for others use DDP"
    )


class RemoteGrad(Tensor):
    """The averaged gradient of a whole parameter; each rank holds a part of it in ``.grad`` of a shard.

    Args:
        param: the whole parameter.
        shard: the parameter whose ``.grad`` holds the part of this rank; None if this rank holds no part.
        scope: the ranks that hold the parts.

    Raises:
        UserError: a function is called that needs the whole gradient.
    """

    scope: GradScope
    groups: Sequence[dist.ProcessGroup]
    shard: nn.Parameter | None

    @staticmethod
    def __new__(cls, param: Tensor, shard: nn.Parameter | None, scope: GradScope) -> RemoteGrad:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        like = {"dtype": param.dtype, "device": param.device, "storage_size": 0}
        self = make(cls, param.shape, strides=param.stride(), **like)
        self.scope, self.groups, self.shard = scope, scope.groups, shard
        return self

    def part(self) -> Tensor:
        """Return the part of this rank, which may be empty."""
        if self.shard is None or self.shard.grad is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return self.shard.grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = OVER_RANKS.get(func) or IN_PLACE.get(func)
        if handler is not None:
            done = handler(*args, **(kwargs or {}))
            if done is not NotImplemented:
                return done
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UserError(
            f"{func.__name__.partition('.')[0]} needs the whole gradient, and a rank of ShardedDDP holds a "
            "part: update with ShardedOptimizer(..., partition=model.partition), or use DDP"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a rank of ShardedDDP holds a part of each gradient, in its flat shards: use p.grad.part(), the "
            "part of this rank, in the place of p.grad"
        )

    __deepcopy__ = __reduce_ex__

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RemoteGrad(shape={tuple(self.shape)})"


def sum_of_parts(local: Tensor, power: float, scope: GradScope) -> Tensor:
    """Return the norms of whole tensors, given those of the parts of this rank, with the same shape.

    Raises:
        UserError: the scope refuses.
    """
    if scope.refusal:
        raise UserError(scope.refusal)
    values = local.to(scope.device, torch.float64)
    how = {inf: dist.ReduceOp.MAX, -inf: dist.ReduceOp.MIN}.get(power, dist.ReduceOp.SUM)
    additive = how is dist.ReduceOp.SUM and power != 0  # the 0-norm counts elements
    if additive:
        values = values**power
    for group in scope.groups:
        dist.all_reduce(values, how, group=group)
    if additive:
        values = values ** (1 / power)
    return values.to(local.device, local.dtype)


def norm_of_part(part: Tensor, power: float) -> Tensor:
    """Return the ``power``-norm of the elements of ``part``, (); of no elements, the value that changes no
    result of the other ranks."""
    if part.numel() == 0:
        return part.new_full((), inf if power == -inf else 0.0)
    return torch.linalg.vector_norm(part, power)


def local_grad(grad: Tensor) -> Tensor:
    """Return the part of ``grad`` that this rank holds."""
    return grad.part() if isinstance(grad, RemoteGrad) else grad
