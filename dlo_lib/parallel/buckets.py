"""Small tensors packed into larger messages: fewer, longer collectives use a network better, at the price of a copy.

A message holds tensors of one dtype and device, in a given order, up to a number of bytes; a larger tensor travels alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNMENT = 16
"""Bytes to which a gradient's place in a bucket is aligned, so that the optimiser's kernels can load vectors."""


class Pending(Protocol):
    """Communication that has begun."""

    def wait(self) -> object:
        """Return when its result is there (on an accelerator: when the current stream will find it there)."""
        ...


@dataclass(eq=False)
class Slot:
    """The place of one parameter's gradient in its bucket (a number, for a reference both ways would outlive its last user)."""

    index: int
    name: str
    param: nn.Parameter
    bucket: int
    offset: int
    strides: tuple[int, ...]
    arrived: bool = False


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype that travel together. ``flat`` is (numel,); ``work`` its communication once that has begun."""

    slots: list[Slot] = field(default_factory=list)
    numel: int = 0
    missing: int = 0
    flat: Tensor | None = None
    work: Pending | None = None

    def add(self, index: int, name: str, param: nn.Parameter, bucket: int) -> Slot:
        """A place at the bucket's end, with the strides in which autograd lays out the gradient."""
        strides = torch.empty_like(param, device="meta").stride()
        self.slots.append(Slot(index, name, param, bucket, self.numel, strides))
        self.missing += 1
        step = _ALIGNMENT // param.element_size()
        self.numel += -(-param.numel() // step) * step
        return self.slots[-1]

    def view(self, slot: Slot) -> Tensor:
        """The gradient of ``slot`` in the flat tensor."""
        return self.allocate().as_strided(slot.param.shape, slot.strides, slot.offset)

    def reset(self, keep_flat: bool) -> None:
        """As before the first gradient. A flat tensor that is not kept lives on in the gradients that are its views."""
        self.work, self.missing = None, len(self.slots)
        if not keep_flat:
            self.flat = None
        for slot in self.slots:
            slot.arrived = False

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
def broadcast_packed(tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_bytes: int, source: int = 0) -> None:
    """Overwrite ``tensors`` with those of the group's rank ``source``, small ones packed into messages of ``bucket_bytes``."""
    origin = dist.get_global_rank(group, source)
    for indices in cut_into_buckets(tensors, bucket_bytes, bucket_bytes):
        members = [tensors[index] for index in indices]
        flat = torch.cat([member.reshape(-1) for member in members])
        dist.broadcast(flat, origin, group=group)
        for member, received in zip(members, flat.split([member.numel() for member in members])):
            member.copy_(received.view(member.shape))
