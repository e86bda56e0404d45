"""The functions of sharded gradients that are computed over all ranks: norms, sums, extrema, and the check of
``torch.amp.GradScaler``. Each reduces the results of the parts; every rank must call them.

A sum over other dimensions than the first is one of whole rows, which a rank has. A sum over the first
dimension alone is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.sharding.sharded_grad import (
    IN_PLACE,
    OVER_RANKS,
    GradScope,
    RemoteGrad,
    ShardedGrad,
    local_grad,
    mark,
    mixes,
    norm_of_part,
    sum_of_parts,
)


def _norms(grads: Sequence[Tensor], power: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each gradient over all ranks, in the order of ``grads``; plain ones are whole."""
    power = float(power)
    with torch._C.DisableTorchFunctionSubclass():
        norms = [norm_of_part(local_grad(grad).to(dtype or grad.dtype), power) for grad in grads]
        by_scope: dict[GradScope, list[int]] = {}
        for number, grad in enumerate(grads):
            if isinstance(grad, ShardedGrad | RemoteGrad):
                by_scope.setdefault(grad.scope, []).append(number)
        for scope, numbers in by_scope.items():
            of_whole = sum_of_parts(torch.stack([norms[number] for number in numbers]), power, scope)
            for number, value in zip(numbers, of_whole.unbind()):
                norms[number] = value
    return norms


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **options: Any
) -> Any:
    if _of_rows(x, dim):
        return _in_rows(torch.linalg.vector_norm, x, ord, dim, keepdim, dtype=dtype, **options)
    _refuse_options("vector_norm", x, dim, keepdim, options)
    return _norms([x], ord, dtype)[0]


def _norm(input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if isinstance(p, str) and p != "fro":
        raise UserError(mixes(f"the {p} norm"))
    return _vector_norm(input, 2 if p is None or isinstance(p, str) else p, dim, keepdim, **options)


def _linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if ord is not None and (isinstance(ord, str) or A.dim() == 2) and dim is None and ord != "fro":
        raise UserError(mixes(f"the matrix norm {ord}"))
    return _norm(A, ord, dim, keepdim, **options)


def _foreach_norm(self: Sequence[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    return _norms(self, ord, dtype)


def _of_rows(x: Tensor, dim: Any) -> bool:
    """Return whether ``dim`` leaves out the first dimension of a tensor that is cut along it."""
    if dim is None or dim == () or not isinstance(x, ShardedGrad) or not x.scope.rows:
        return False
    return all(number % max(1, x.dim()) != 0 for number in (dim if isinstance(dim, list | tuple) else (dim,)))


def _in_rows(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of each row, which is a part of the results of all rows."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(x, *args, **kwargs)
    for tensor in result if isinstance(result, tuple) else (result,):
        if tensor.is_floating_point():
            mark(tensor, x.scope)
    return result


def _refuse_options(name: str, x: Tensor, dim: Any, keepdim: bool, options: Mapping[str, Any]) -> None:
    options = {key: value for key, value in options.items() if value is not None}
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if keepdim or options or (dims and len({number % max(1, x.dim()) for number in dims}) < x.dim()):
        given = ", ".join(["dim"] * bool(dims) + ["keepdim"] * bool(keepdim) + list(options))
        raise UserError(mixes(f"{name} with {given}"))


def _over_all(name: str, how: Any, nothing: float) -> Callable[..., Any]:
    """Return a handler of ``Tensor.<name>`` over all elements, or over dimensions within rows.

    Args:
        how: combines the results of the ranks.
        nothing: the result without elements.
    """
    local: Callable[..., Any] = getattr(Tensor, name)

    def handler(input: Any, *args: Any, **options: Any) -> Any:
        other = options.get("other", args[0] if args else None)
        if isinstance(other, Tensor):  # of two tensors
            return torch.maximum(input, other) if name == "max" else torch.minimum(input, other)
        named = dict(zip(("dim", "keepdim"), args)) | options
        dim = named.get("dim", named.get("axis"))
        if _of_rows(input, dim):
            return _in_rows(local, input, **named)
        dtype = named.pop("dtype", None)
        others = {key: value for key, value in named.items() if key not in ("dim", "axis", "keepdim")}
        _refuse_options(name, input, dim, named.get("keepdim", False), others)
        with torch._C.DisableTorchFunctionSubclass():
            part = local_grad(input).to(dtype or input.dtype)
            value = local(part) if part.numel() else local(part.new_zeros(1))
            number = value.double() if part.numel() else value.new_full((), nothing, dtype=torch.float64)
            # An extremum with NaN is NaN, which one over ranks would not keep: a flag is sent as well.
            flag = number.isnan()
            total = _reduced(torch.where(flag, nothing, number), how, input.scope)
            if value.is_floating_point():
                total = torch.where(_reduced(flag.double(), dist.ReduceOp.MAX, input.scope) > 0, nan, total)
            return total.to(value.dtype)

    return handler


_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_sum = _over_all("sum", _SUM, 0)


def _mean(input: Any, *args: Any, **options: Any) -> Any:
    if _of_rows(input, options.get("dim", args[0] if args else None)):
        return _in_rows(Tensor.mean, input, *args, **options)
    with torch._C.DisableTorchFunctionSubclass():
        count = _reduced(torch.tensor(float(local_grad(input).numel())), _SUM, input.scope)
    return _sum(input, *args, **options) / count


def _reduced(number: Tensor, how: Any, scope: GradScope) -> Tensor:
    """Return ``number``, (), reduced over the ranks of ``scope``.

    Raises:
        UserError: the scope refuses.
    """
    if scope.refusal:
        raise UserError(scope.refusal)
    sent = number.to(scope.device)
    for group in scope.groups:
        dist.all_reduce(sent, how, group=group)
    return sent.to(number.device)


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


def _joined(join: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def handler(tensors: Sequence[Any], *args: Any, **options: Any) -> Tensor:
        groups = [list(one.scope.groups) if isinstance(one, ShardedGrad) else None for one in tensors]
        if groups != groups[:1] * len(groups):
            raise UserError(mixes(f"{join.__name__} of sharded gradients and other tensors"))
        with torch._C.DisableTorchFunctionSubclass():
            return mark(join(tensors, *args, **options), replace(tensors[0].scope, rows=False))

    return handler


OVER_RANKS |= {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.cat: _joined(torch.cat),
    torch.stack: _joined(torch.stack),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((torch.max, Tensor.max), _over_all("max", _MAX, -inf)),
    **dict.fromkeys((torch.amax, Tensor.amax), _over_all("amax", _MAX, -inf)),
    **dict.fromkeys((torch.min, Tensor.min), _over_all("min", _MIN, inf)),
    **dict.fromkeys((torch.amin, Tensor.amin), _over_all("amin", _MIN, inf)),
    **dict.fromkeys((torch.any, Tensor.any), _over_all("any", _MAX, 0)),
    **dict.fromkeys((torch.all, Tensor.all), _over_all("all", _MIN, 1)),
}
IN_PLACE |= {
    Tensor.mul_: _scale,
    torch._foreach_mul_: _scale_all,
    Tensor.zero_: _clear,
    torch._foreach_zero_: _clear_all,
    Tensor.requires_grad_: lambda self, requires_grad=True: self,
    Tensor.detach_: lambda self: self,
}
