"""The collectives of tensor parallelism on one dimension of a tensor, without autograd. Each starts an
exchange and returns a function that waits for it and returns the result, so that computation can overlap with
it.

With t ranks, f = (t-1)/t and B the bytes of the whole tensor, a rank sends 2 B f in an all-reduce and B f in
an all-gather or a reduce-scatter. A message is contiguous. If the dimension is not the first one, the parts
are copied once, before the reduce-scatter or after the all-gather. The collectives of the backend are used
also over gloo, where ``sharding.transport`` prefers point-to-point messages for FSDP: with the small messages
of a layer, which a rank waits for at once, these take 1.5 times the CPU time of a step with sequence
parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_compat import all_gather_single, reduce_scatter_single
from dlo_lib.parallel.mesh import factors_in_words

Result = Callable[[], Tensor]
"""Waits for the end of an exchange and returns the tensor."""


class TensorGroup:
    """The ranks that share each matrix, with their exchanges.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, x: Tensor) -> Result:
        """Start to sum ``x`` over the ranks, in place. A tensor that is not contiguous is copied."""
        x = x.contiguous()
        if self.ranks == 1:
            return lambda: x
        work = dist.all_reduce(x, group=self.group, async_op=True)

        def wait() -> Tensor:
            assert work is not None
            work.wait()
            return x

        return wait

    def all_gather(self, x: Tensor, dim: int) -> Result:
        """Start to concatenate ``x`` of every rank along ``dim``."""
        if self.ranks == 1:
            return lambda: x
        x = x.contiguous()
        whole = x.new_empty(self.ranks * x.numel())
        work = all_gather_single(whole, x.view(-1), group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return _joined(whole.view(self.ranks, *x.shape), dim % x.dim())

        return wait

    def reduce_scatter(self, x: Tensor, dim: int) -> Result:
        """Start to sum ``x`` over the ranks; the result is the part of this rank along ``dim``.

        Raises:
            UserError: the size of the dimension is not a multiple of the number of ranks.
        """
        if self.ranks == 1:
            return lambda: x
        parts = _parted(x, dim % x.dim(), self.ranks)
        mine = parts.new_empty(parts.shape[1:])
        work = reduce_scatter_single(mine.view(-1), parts.view(-1), group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return mine

        return wait

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of this rank of ``x`` along ``dim``, as a view.

        Raises:
            UserError: the size of the dimension is not a multiple of the number of ranks.
        """
        check_divides(x.shape[dim], self.ranks)
        return x.chunk(self.ranks, dim)[self.rank]


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Concatenate parts, (ranks, ...), along dimension ``dim`` of a part."""
    shape = list(parts.shape[1:])
    if math.prod(shape[:dim]) == 1:
        shape[dim] *= len(parts)
        return parts.view(shape)
    return torch.cat(parts.unbind(), dim)


def _parted(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Return the parts of ``x`` along ``dim``, (ranks, ...), in contiguous memory."""
    check_divides(x.shape[dim], ranks)
    if math.prod(x.shape[:dim]) == 1:
        shape = list(x.shape)
        shape[dim] //= ranks
        return x.contiguous().view(ranks, *shape)
    return torch.stack(x.chunk(ranks, dim))


def check_divides(size: int, ranks: int) -> None:
    """Check that a sequence of ``size`` tokens has equal parts on all ranks.

    Raises:
        UserError: it has not. The message names degrees and lengths that fit.
    """
    if size % ranks:
        raise UserError(
            f"a sequence of {size} is not a multiple of tp {ranks}: "
            f"use tp {factors_in_words(size)}, or sequences of {size // ranks * ranks or ranks} tokens",
        )
