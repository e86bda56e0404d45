"""The communication of tensor parallelism as autograd functions: each is the adjoint of its partner.

Let x be a tensor that is equal on all t ranks, and x_r a different tensor on each rank r.

    function             forward                       backward
    copy_to_group        y_r = x                       dx   = sum of dy_r     (all-reduce)
    reduce_from_group    y   = sum of x_r              dx_r = dy              (nothing)
    gather_sequence      y   = [x_0 ... x_(t-1)]       dx_r = (sum of dy_q)_r (reduce-scatter)
    scatter_sequence     y_r = (sum of x_q)_r          dx_r = [dy_0 ...]      (all-gather)
    gather_from_group    y   = [x_0 ... x_(t-1)]       dx_r = (dy)_r          (nothing)
    split_to_group       y_r = (x)_r                   dx   = [dy_0 ...]      (all-gather)

Between ``copy_to_group`` and ``reduce_from_group``, a pair of layers computes f(x) = sum over r of
B_r act(A_r x), where the rows of A and the columns of B are cut over the ranks. Megatron calls the two
functions f and g. Sequence parallelism replaces them by ``gather_sequence`` and ``scatter_sequence``.

Bytes sent per rank, with f = (t-1)/t and B the bytes of the whole tensor (batch * seq * hidden elements): 2 B
f for an all-reduce, B f for an all-gather or a reduce-scatter. A block has two pairs: 4 all-reduces of B in
forward and backward together, or 4 all-gathers and 4 reduce-scatters. Both send 8 B f.

Papers: Megatron-LM (arXiv:1909.08053), section 3; sequence parallelism (arXiv:2205.05198), section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.parallel.tensor.exchange import TensorGroup

SEQUENCE = -2
"""The dimension of the tokens in (batch, seq, hidden)."""


def copy_to_group(x: Tensor, group: TensorGroup) -> Tensor:
    """Return ``x``, which is equal on all ranks; backward sums the gradients of the ranks. The input of a
    column linear.

    Args:
        x: any shape and floating-point dtype.
        group: the ranks.
    """
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of ``x`` over the ranks; backward returns the gradient unchanged. The output of a row
    linear.

    The memory of ``x`` is overwritten by the sum.

    Args:
        x: any shape and floating-point dtype; not a leaf that requires a gradient.
        group: the ranks.
    """
    return _ReduceFromGroup.apply(x, group)


def gather_sequence(x: Tensor, group: TensorGroup, dim: int = SEQUENCE) -> Tensor:
    """Return the parts ``x`` of all ranks, concatenated along ``dim``; backward sums the gradients of the
    ranks and returns the part of this rank. The input of a column linear with sequence parallelism.

    Args:
        x: (..., seq / t, hidden) for the default ``dim``.
        group: the ranks.
        dim: the dimension to gather.
    """
    return _GatherSequence.apply(x, group, dim)


def scatter_sequence(x: Tensor, group: TensorGroup, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's part along ``dim`` of the sum of ``x`` over the ranks; backward gathers the
    gradients. The output of a row linear with sequence parallelism.

    Args:
        x: (..., seq, hidden) for the default ``dim``.
        group: the ranks.
        dim: the dimension to scatter.

    Raises:
        UserError: the size of the dimension is not a multiple of the number of ranks.
    """
    return _ScatterSequence.apply(x, group, dim)


def gather_from_group(x: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Return the parts ``x`` of all ranks, concatenated along ``dim``; backward returns this rank's part of
    the gradient, which must be equal on all ranks.

    Args:
        x: any shape; equal sizes on all ranks.
        group: the ranks.
        dim: the dimension to gather.
    """
    return _GatherFromGroup.apply(x, group, dim)


def split_to_group(x: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Return this rank's part of ``x``, which is equal on all ranks; backward gathers the gradients.

    Args:
        x: any shape.
        group: the ranks.
        dim: the dimension to split.

    Raises:
        UserError: the size of the dimension is not a multiple of the number of ranks.
    """
    return _SplitToGroup.apply(x, group, dim)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Autograd may use the incoming gradient elsewhere, so its memory is not overwritten.
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format))(), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        if x.is_contiguous():
            ctx.mark_dirty(x)
        return group.all_reduce(x)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x, dim)() if group.ranks > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.reduce_scatter(grad, ctx.dim)(), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(x, dim)() if group.ranks > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.all_gather(grad, ctx.dim)(), None, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x, dim)() if group.ranks > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.part(grad, ctx.dim).contiguous(), None, None


class _SplitToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.part(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.all_gather(grad, ctx.dim)(), None, None
