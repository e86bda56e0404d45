"""Which rank updates what: parameters laid out in flat buckets, of which every rank owns equal parts.

Parameters are moved, once, into flat memory: their own storage is the message that brings everybody the updated values. Rank r owns the
r-th part of every bucket, wherever a parameter begins or ends in it, so shares are equal to a few bytes whatever the parameters' sizes.

    bucket     [ A A A A B B | B B C C C C | C D D D - - ]        3 ranks; B and C are cut, - is padding
    pieces       A, B[:2]      B[2:], C[:4]  C[4:], D

An update that looks at a parameter as a whole (a matrix's norm, its rows and columns) cannot be done in pieces: for such optimisers whole
parameters are dealt out instead, each to the rank that owns least so far, and a bucket holds what one rank owns.

Cost: to publish the updates, B_p (N-1)/N bytes per rank (all-gather), in place and so without any buffer; parameters dealt out whole are
sent by their owners (broadcast). Padding: at most 16 bytes a parameter, and 16 a rank and bucket.

Paper: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from dlo_lib.errors import UserError
from dlo_lib.parallel.buckets import cut_into_buckets
from dlo_lib.parallel.wire import Wire, best_wire

ALIGNMENT = 16
"""Bytes to which parameters and pieces are aligned, so that kernels can load vectors."""


class Split(enum.Enum):
    """What is dealt out to ranks."""

    ELEMENTS = "elements"
    """Equal parts of flat memory: for updates of each element by itself."""
    PARAMETERS = "parameters"
    """Parameters as a whole: for any update. The largest one bounds how even the shares can be."""


@dataclass(eq=False)
class Piece:
    """What this rank owns of ``param``: its elements ``start`` to ``stop``, in the order in which they lie in memory."""

    param: nn.Parameter
    strides: tuple[int, ...]
    start: int
    stop: int
    mine: Tensor
    """They themselves, in the parameter's memory: of its shape where that is all of it, else (stop - start,)."""
    shard: nn.Parameter = field(init=False)
    """What an optimiser steps on: the same memory, or a copy elsewhere or in another dtype."""

    def __post_init__(self) -> None:
        self.shard = nn.Parameter(self.mine)

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.param.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of ``tensor``, which has the parameter's shape: a view where its memory is laid out alike."""
        if self.whole:
            return tensor
        if tensor.stride() != self.strides:
            tensor = tensor.new_empty_strided(tensor.shape, self.strides).copy_(tensor)
        return tensor.as_strided((self.stop - self.start,), (1,), int(tensor.storage_offset()) + self.start)

    def put(self, part: Tensor, tensor: Tensor) -> None:
        """Write those elements into ``tensor``, which has the parameter's shape and ``strides``."""
        self.of(tensor).copy_(part.view(tensor.shape) if self.whole else part)


@dataclass(eq=False)
class Place:
    """A parameter in its bucket."""

    param: nn.Parameter
    strides: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class FlatBucket:
    """``flat`` is (numel,), the memory of its parameters; ``owner`` the rank that owns all of it, None where each has an equal part."""

    places: list[Place]
    flat: Tensor
    owner: int | None

    @property
    def padded_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class Partition:
    """``params``, moved into flat buckets and dealt out to the ranks of ``group``; every rank makes it of the same ones in the same order.

    Args:
        params: to be updated; those that do not require gradients are left where they are.
        split: what is dealt out.
        bucket_bytes: the most a bucket holds (a larger parameter is a bucket of its own).
        wire: how parts travel; None for the cheaper way.

    Raises:
        UserError: two parameters share memory without being one.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        split: Split = Split.ELEMENTS,
        bucket_bytes: int,
        wire: Wire | None = None,
    ) -> None:
        self.group, self.split = group, split
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.buckets: list[FlatBucket] = []
        self.pieces: dict[nn.Parameter, Piece] = {}
        """What this rank owns, by parameter."""
        self._bucket_bytes, self._wire = bucket_bytes, wire
        self._known: set[nn.Parameter] = set()
        self._owned = [0] * self.ranks  # bytes of whole parameters dealt to each
        self.add(params)

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._known

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """Lay out and deal out further parameters; called by every rank."""
        new = [param for param in dict.fromkeys(params) if param.requires_grad and param not in self._known]
        _check_apart(new)
        self._known.update(new)
        if self.split is Split.ELEMENTS:
            for indices in cut_into_buckets(new, self._bucket_bytes, self._bucket_bytes):
                self._lay_out([new[index] for index in indices], owner=None)
            return
        for owner, dealt in enumerate(self._dealt(new)):
            for indices in cut_into_buckets(dealt, self._bucket_bytes, self._bucket_bytes):
                self._lay_out([dealt[index] for index in indices], owner)

    def _dealt(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The largest first, each to whom least was dealt: nobody gets more than a third above the best that is possible."""
        dealt: list[list[nn.Parameter]] = [[] for _ in range(self.ranks)]
        for param in sorted(params, key=lambda param: -param.numel() * param.element_size()):
            owner = self._owned.index(min(self._owned))
            self._owned[owner] += param.numel() * param.element_size()
            dealt[owner].append(param)
        return dealt

    @torch.no_grad()
    def _lay_out(self, params: list[nn.Parameter], owner: int | None) -> None:
        like, places, numel = params[0], [], 0
        step = max(1, ALIGNMENT // like.element_size())
        for param in params:
            places.append(Place(param, torch.empty_like(param, device="meta").stride(), numel))
            numel += _up(param.numel(), step)
        if owner is None:
            numel = _up(numel, step * self.ranks)
        bucket = FlatBucket(places, torch.zeros(numel, dtype=like.dtype, device=like.device), owner)
        for place in places:
            view = bucket.flat.as_strided(place.param.shape, place.strides, place.offset)
            view.copy_(place.param)
            place.param.data = view  # what it had is freed here
        self.buckets.append(bucket)
        first, last = self.part_of(bucket)
        for place in places:
            start, stop = max(first - place.offset, 0), min(last - place.offset, place.param.numel())
            if start < stop or (place.param.numel() == 0 and self.rank == (owner or 0)):
                mine = place.param.detach()
                if stop - start < place.param.numel():
                    mine = bucket.flat[place.offset + start : place.offset + stop]
                self.pieces[place.param] = Piece(place.param, place.strides, start, stop, mine)

    def part_of(self, bucket: FlatBucket) -> tuple[int, int]:
        """Which elements of a bucket this rank owns."""
        numel = bucket.flat.numel()
        if bucket.owner is not None:
            return (0, numel) if bucket.owner == self.rank else (0, 0)
        return self.rank * numel // self.ranks, (self.rank + 1) * numel // self.ranks

    @torch.no_grad()
    def publish(self) -> None:
        """Give everybody what each has updated of its own. All buckets are on their way at once, for they are their own memory."""
        waits = []
        for bucket in self.buckets:
            if bucket.owner is None:
                first, last = self.part_of(bucket)
                wire = self._wire or best_wire(self.group, bucket.flat.device)
                waits.append(wire.all_gather(bucket.flat, bucket.flat[first:last], self.group))
            else:
                work = dist.broadcast(bucket.flat, group=self.group, group_src=bucket.owner, async_op=True)
                assert work is not None
                waits.append(work.wait)
        for wait in waits:
            wait()
        for bucket in self.buckets:  # autograd learns that what it has saved of them is gone
            increment_version([place.param for place in bucket.places])


def _check_apart(params: Sequence[nn.Parameter]) -> None:
    """Moved apart, they would no longer be tied."""
    ends: dict[int, list[tuple[int, int, int]]] = {}
    for number, param in enumerate(params):
        first = int(param.storage_offset())
        last = first + sum(stride * (size - 1) for stride, size in zip(param.stride(), param.shape)) + 1
        if param.numel():
            ends.setdefault(param.untyped_storage()._cdata, []).append((first, last, number))
    for spans in ends.values():
        spans.sort()
        for (_, last, one), (first, _, other) in itertools.pairwise(spans):
            if first < last:
                shapes = " and ".join(str(tuple(params[number].shape)) for number in (one, other))
                raise UserError(f"two parameters, {shapes}, share memory: tie them by assigning one nn.Parameter to both modules")


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
