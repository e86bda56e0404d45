"""The two collectives of sharding, of one flat tensor each, under the names that this version of PyTorch has for them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def all_gather(whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill ``whole``, (ranks * n,), with everyone's ``mine``, (n,), in the order of ranks."""
    return _all_gather(whole, mine, group=group, async_op=True)


def reduce_scatter(mine: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill ``mine``, (n,), with this rank's part of the sum of everyone's ``whole``, (ranks * n,)."""
    return _reduce_scatter(mine, whole, group=group, async_op=True)
