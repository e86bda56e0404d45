"""Small tensors packed into larger messages: fewer, longer collectives use a network better, at the price of a copy.

A message holds tensors of one dtype and device, in a given order, up to a number of bytes; a larger tensor travels alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNMENT = 16
"""Bytes to which a gradient's place in a bucket is aligned, so that the optimiser's kernels can load vectors."""


def padded_numel(tensor: Tensor) -> int:
    """Elements a tensor takes in a bucket."""
    step = _ALIGNMENT // tensor.element_size()
    return -(-tensor.numel() // step) * step


@dataclass(eq=False)
class Slot:
    """The place of one parameter's gradient in its bucket."""

    index: int
    name: str
    param: nn.Parameter
    bucket: Bucket
    offset: int
    arrived: bool = False

    def view(self) -> Tensor:
        """The gradient inside the bucket's flat tensor, with the parameter's own strides (as autograd lays it out)."""
        assert self.bucket.flat is not None
        return self.bucket.flat.as_strided(self.param.shape, torch.empty_like(self.param, device="meta").stride(), self.offset)


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype that travel together. ``flat`` is (numel,); ``work`` its all-reduce once that has been issued."""

    slots: list[Slot]
    numel: int
    missing: int
    flat: Tensor | None = None
    work: dist.Work | None = None

    def allocate(self) -> Tensor:
        if self.flat is None:
            padded = self.numel > sum(slot.param.numel() for slot in self.slots)
            make = torch.zeros if padded else torch.empty
            like = self.slots[0].param
            self.flat = make(self.numel, dtype=like.dtype, device=like.device)
        return self.flat


def cut_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
    """Indices of ``tensors`` in groups of one dtype and device, filled in order and ordered by their last member.

    A group holds at most ``bucket_bytes`` (the first of each dtype ``first_bucket_bytes``) or a single larger tensor.
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
def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Overwrite ``tensors`` with those of the group's first rank, small ones packed into messages of ``bucket_bytes``."""
    first = dist.get_global_rank(group, 0)
    for indices in cut_into_buckets(tensors, bucket_bytes, bucket_bytes):
        members = [tensors[index] for index in indices]
        flat = torch.cat([member.reshape(-1) for member in members])
        dist.broadcast(flat, first, group=group)
        for member, received in zip(members, flat.split([member.numel() for member in members])):
            member.copy_(received.view(member.shape))
