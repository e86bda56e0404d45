"""Packs small tensors into larger messages, because few large collectives use a network better than many
small ones. The cost is a copy.

A message contains tensors of one dtype and device, in a given order, up to a number of bytes. A tensor that
is larger than this number is a message by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def cut_into_buckets(
    tensors: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> list[list[int]]:
    """Group the indices of ``tensors`` into buckets of one dtype and device, filled in order and sorted by
    their last index.

    A bucket contains at most ``bucket_bytes`` (the first bucket of each dtype ``first_bucket_bytes``), or one
    larger tensor.
    """
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, int]] = {}
    for index, tensor in enumerate(tensors):
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        bucket, held, limit = filling.get(kind, ([], 0, first_bucket_bytes))
        if bucket and held + size > limit:
            bucket, held, limit = [], 0, bucket_bytes
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = (bucket, held + size, limit)
    return sorted(buckets, key=lambda bucket: bucket[-1])


@torch.no_grad()
def broadcast_packed(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_bytes: int, source: int = 0
) -> None:
    """Overwrite ``tensors`` in place with those of rank ``source`` of ``group``; called by every rank.

    Small tensors are packed into messages of at most ``bucket_bytes``. A message is sent as bytes, because
    backends do not know every dtype (16-bit integers, fp8).
    """
    origin = dist.get_global_rank(group, source)
    for indices in cut_into_buckets(tensors, bucket_bytes, bucket_bytes):
        members = [tensors[index] for index in indices]
        flat = torch.cat([member.reshape(-1) for member in members])
        dist.broadcast(flat.view(torch.uint8), origin, group=group)
        for member, received in zip(members, flat.split([member.numel() for member in members])):
            member.copy_(received.view(member.shape))


@torch.no_grad()
def all_reduce_packed(tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Sum ``tensors`` over ``group`` in place; called by every rank, with equal shapes.

    Small tensors are packed into messages of at most ``bucket_bytes``. A contiguous tensor that is a message
    by itself is not copied.
    """
    for indices in cut_into_buckets(tensors, bucket_bytes, bucket_bytes):
        members = [tensors[index] for index in indices]
        if len(members) == 1 and members[0].is_contiguous():
            dist.all_reduce(members[0], group=group)
            continue
        flat = torch.cat([member.reshape(-1) for member in members])
        dist.all_reduce(flat, group=group)
        sums = flat.split([member.numel() for member in members])
        torch._foreach_copy_(members, [part.view(member.shape) for part, member in zip(sums, members)])
