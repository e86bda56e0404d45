"""Gradients that know that they are parts, so that PyTorch's own functions compute the norm of the whole.

``nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` call a few functions on the gradients. With plain
tensors each rank would get the norm of its shards, and would detect only the overflows of its shards. The
classes of this module compute these functions over all ranks:

    torch.linalg.vector_norm, torch.norm, Tensor.norm, torch._foreach_norm    one all-reduce of the norms
    torch._amp_foreach_non_finite_check_and_unscale_                          one all-reduce of the flag

All other functions compute on the part of this rank and return plain tensors, so an optimiser does not notice
the class. A ``ShardedGrad`` is the part itself. A ``RemoteGrad`` stands in ``.grad`` of a whole parameter
whose averaged gradient is elsewhere, in the shards of ZeRO stage 2; it holds no memory.

The gradients of PyTorch's ``fully_shard`` are ``DTensor``s, which do the same for all operators. The classes
of this module cost less: a few microseconds a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.errors import UserError


@dataclass(frozen=True, eq=False)
class GradScope:
    """The ranks that hold the parts of a gradient.

    Attributes:
        groups: the groups, one for each mesh dimension, whose ranks hold different parts.
        device: the device on which the groups communicate.
        refusal: "", or the message of a ``UserError`` that the functions over all ranks raise.
    """

    groups: Sequence[dist.ProcessGroup]
    device: torch.device
    refusal: str = ""


class ShardedGrad(Tensor):
    """The part of a gradient that this rank holds; create it with ``mark``."""

    scope: GradScope

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _OVER_RANKS.get(func)
        if handler is not None:
            done = handler(*args, **(kwargs or {}))
            if done is not NotImplemented:
                return done
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return mark(result, args[0].scope) if func in _SAME_GRADIENT else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return mark(plain_part(self), self.scope)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Another process receives the part as a plain tensor, because the ranks of the scope stay here."""
        return plain_part(self).__reduce_ex__(protocol)


def plain_part(grad: Tensor) -> Tensor:
    """Return a copy of the part of ``grad`` that this rank holds, a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return local_grad(grad).detach().as_subclass(Tensor).clone()  # type: ignore[arg-type]


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
        handler = _OVER_RANKS.get(func) or _IN_PLACE.get(func)
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
    how = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(power, dist.ReduceOp.SUM)
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
        return part.new_full((), math.inf if power == -math.inf else 0.0)
    return torch.linalg.vector_norm(part, power)


def local_grad(grad: Tensor) -> Tensor:
    """Return the part of ``grad`` that this rank holds."""
    return grad.part() if isinstance(grad, RemoteGrad) else grad


def _norms(grads: Sequence[Tensor], power: Any = 2) -> list[Tensor]:
    """Return the norm of each gradient over all ranks, in the order of ``grads``; plain ones are whole."""
    power = float(power)
    with torch._C.DisableTorchFunctionSubclass():
        norms = [norm_of_part(local_grad(grad), power) for grad in grads]
        by_scope: dict[GradScope, list[int]] = {}
        for number, grad in enumerate(grads):
            if isinstance(grad, ShardedGrad | RemoteGrad):
                by_scope.setdefault(grad.scope, []).append(number)
        for scope, numbers in by_scope.items():
            of_whole = sum_of_parts(torch.stack([norms[number] for number in numbers]), power, scope)
            for number, value in zip(numbers, of_whole.unbind()):
                norms[number] = value
    return norms


def _vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if dim is not None or keepdim or options:
        return NotImplemented
    return _norms([x], ord)[0]


def _norm(input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if isinstance(p, str) and p != "fro":
        return NotImplemented
    return _vector_norm(input, 2 if p is None or isinstance(p, str) else p, dim, keepdim)


def _foreach_norm(self: Sequence[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    return NotImplemented if dtype is not None else _norms(self, ord)


def _unscale(self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply the gradients by ``inv_scale``; set ``found_inf`` to 1 if one is not finite on any rank."""
    scopes = [grad.scope for grad in self if isinstance(grad, ShardedGrad | RemoteGrad)]
    for scope in scopes:
        if scope.refusal:
            raise UserError(scope.refusal)
    with torch._C.DisableTorchFunctionSubclass():
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for part in map(local_grad, self):
            by_dtype.setdefault(part.dtype, []).append(part)
        for parts in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inv_scale)
        flag = found_inf.to(scopes[0].device)
        # Tensor-parallel parts are over more groups than whole parameters.
        for group in dict.fromkeys(group for scope in scopes for group in scope.groups):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        found_inf.copy_(flag)


def _scale(self: Tensor, factor: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        local_grad(self).mul_(factor)
    return self


def _scale_all(self: Sequence[Tensor], factor: Any) -> None:
    for grad in self:
        _scale(grad, factor)


def _clear(self: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        local_grad(self).zero_()
    return self


def _clear_all(self: Sequence[Tensor]) -> None:
    for grad in self:
        _clear(grad)


_OVER_RANKS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    Tensor.mul_: _scale,
    torch._foreach_mul_: _scale_all,
    Tensor.zero_: _clear,
    torch._foreach_zero_: _clear_all,
    Tensor.requires_grad_: lambda self, requires_grad=True: self,
    Tensor.detach_: lambda self: self,
}
_SAME_GRADIENT = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
