"""Assigns the parameters to the ranks that update them. The parameters are stored in flat buckets, of which
every rank owns an equal part.

The parameters are moved once into flat memory. The exchange of updated values then sends this memory
directly, without a copy. Rank r owns part r of every bucket, independently of the boundaries of parameters,
so that the parts of the ranks differ by a few bytes at most.

    bucket     [ A A A A B B | B B C C C C | C D D D - - ]        3 ranks; B and C are cut, - is padding
    pieces       A, B[:2]      B[2:], C[:4]  C[4:], D

Some optimisers need a parameter as a whole, for example the norm, the rows or the columns of a matrix. For
them, each rank owns whole parameters: each parameter is assigned to the rank that owns the fewest bytes so
far, and a bucket contains parameters of one rank.

Cost of the exchange: B_p (N-1)/N bytes per rank (all-gather), in place and without buffers. Whole parameters
are broadcast by their owners. Padding: at most 16 bytes for each parameter, and 16 bytes for each rank and
bucket.

Paper: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.held_params import HeldMemory
from dlo_lib.parallel.sharding.buckets import cut_into_buckets
from dlo_lib.parallel.sharding.transport import Transport, default_transport

ALIGNMENT = 16
"""The alignment of parameters and pieces in bytes, so that kernels can use vector loads."""


class PartitionBy(enum.Enum):
    """The unit of memory that is assigned to a rank."""

    ELEMENTS = "elements"
    """Equal parts of flat memory, for optimisers that update each element independently."""
    PARAMETERS = "parameters"
    """Whole parameters, for any optimiser. The balance is limited by the largest parameter."""


@dataclass(eq=False)
class Piece:
    """The part of ``param`` that this rank owns: the elements ``start`` to ``stop``, in the order of
    memory."""

    param: nn.Parameter
    strides: tuple[int, ...]
    start: int
    stop: int
    mine: Tensor
    """A view of these elements of ``param``: the whole parameter with its shape, otherwise (stop -
    start,)."""
    shard: nn.Parameter = field(init=False)
    """The parameter that the optimiser updates: the memory of ``mine``, or a copy on another device or in
    another dtype."""

    def __post_init__(self) -> None:
        self.shard = nn.Parameter(self.mine)

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.param.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements of the piece in ``tensor``, which has the shape of the parameter. The result is
        a view if ``tensor`` has the strides of the parameter."""
        if self.whole:
            return tensor
        if tensor.stride() != self.strides:
            tensor = tensor.new_empty_strided(tensor.shape, self.strides).copy_(tensor)
        return tensor.as_strided((self.stop - self.start,), (1,), int(tensor.storage_offset()) + self.start)

    def put(self, part: Tensor, tensor: Tensor) -> None:
        """Write ``part``, the elements of the piece, into ``tensor``, which has the shape and strides of the
        parameter."""
        self.of(tensor).copy_(part.view(tensor.shape) if self.whole else part)


@dataclass(eq=False)
class BucketEntry:
    """The position of a parameter in its bucket; ``offset`` counts elements."""

    param: nn.Parameter
    strides: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class ParamBucket:
    """A flat tensor that contains parameters.

    Attributes:
        entries: the parameters and their positions.
        flat: the memory of the parameters, (numel,).
        owner: the rank that owns the whole bucket; None if every rank owns an equal part.
    """

    entries: list[BucketEntry]
    flat: Tensor
    owner: int | None

    @property
    def padded_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class Partition:
    """Moves ``params`` into flat buckets and assigns them to the ranks of ``group``. Every rank creates it
    with the same parameters in the same order.

    Args:
        params: the parameters to update. Parameters that do not require gradients are not moved.
        split: whether ranks own parts of flat memory or whole parameters.
        bucket_bytes: the largest size of a bucket. A larger parameter is a bucket by itself.
        transport: how parts are exchanged; None for the cheaper transport.

    Raises:
        UserError: two different parameters share memory.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        split: PartitionBy = PartitionBy.ELEMENTS,
        bucket_bytes: int,
        transport: Transport | None = None,
    ) -> None:
        self.group, self.split = group, split
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.buckets: list[ParamBucket] = []
        self.pieces: dict[nn.Parameter, Piece] = {}
        """The pieces that this rank owns, by parameter."""
        self.discard_unaveraged: Callable[[], None] = lambda: None
        """Called by ``zero_grad``: discards gradients that are not averaged yet, as those of ``no_sync``."""
        self._bucket_bytes, self._transport = bucket_bytes, transport
        self._known: set[nn.Parameter] = set()
        self._owned_bytes = [0] * self.ranks  # of whole parameters, by rank
        self.add(params)

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._known

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """Add parameters; called by every rank with the same ones."""
        new = [param for param in dict.fromkeys(params) if param.requires_grad and param not in self._known]
        _check_no_overlap(new)
        self._known.update(new)
        if self.split is PartitionBy.ELEMENTS:
            owners: list[tuple[int | None, list[nn.Parameter]]] = [(None, new)]
        else:
            owners = list(enumerate(self._assign_owners(new)))
        for owner, owned in owners:
            for indices in cut_into_buckets(owned, self._bucket_bytes, self._bucket_bytes):
                self._add_bucket([owned[index] for index in indices], owner)
        moved = [entry.param for bucket in self.buckets for entry in bucket.entries]
        names = {param: f"a parameter of shape {tuple(param.shape)}" for param in moved}
        self._held = HeldMemory(names, "ShardedOptimizer")

    def check(self) -> None:
        """Check that the parameters are still in the flat memory.

        Raises:
            UserError: they were moved or cast, as by ``module.bfloat16()``.
        """
        self._held.check()

    def _assign_owners(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Assign the parameters, the largest first, to the rank that owns the fewest bytes. The largest share
        exceeds the optimum by at most one third (R. L. Graham, Bounds on Multiprocessing Timing Anomalies,
        1969)."""
        owned: list[list[nn.Parameter]] = [[] for _ in range(self.ranks)]
        for param in sorted(params, key=lambda param: -param.numel() * param.element_size()):
            owner = self._owned_bytes.index(min(self._owned_bytes))
            self._owned_bytes[owner] += param.numel() * param.element_size()
            owned[owner].append(param)
        return owned

    @torch.no_grad()
    def _add_bucket(self, params: list[nn.Parameter], owner: int | None) -> None:
        like, entries, numel = params[0], [], 0
        step = max(1, ALIGNMENT // like.element_size())
        for param in params:
            entries.append(BucketEntry(param, torch.empty_like(param, device="meta").stride(), numel))
            numel += _round_up(param.numel(), step)
        if owner is None:
            numel = _round_up(numel, step * self.ranks)
        bucket = ParamBucket(entries, torch.zeros(numel, dtype=like.dtype, device=like.device), owner)
        for entry in entries:
            view = bucket.flat.as_strided(entry.param.shape, entry.strides, entry.offset)
            view.copy_(entry.param)
            entry.param.data = view  # frees the old memory of the parameter
        self.buckets.append(bucket)
        first, last = self.part_of(bucket)
        for entry in entries:
            start, stop = max(first - entry.offset, 0), min(last - entry.offset, entry.param.numel())
            if start < stop or (entry.param.numel() == 0 and self.rank == (owner or 0)):
                mine = entry.param.detach()
                if stop - start < entry.param.numel():
                    mine = bucket.flat[entry.offset + start : entry.offset + stop]
                self.pieces[entry.param] = Piece(entry.param, entry.strides, start, stop, mine)

    def part_of(self, bucket: ParamBucket) -> tuple[int, int]:
        """Return the first element of a bucket that this rank owns, and the element after the last one."""
        numel = bucket.flat.numel()
        if bucket.owner is not None:
            return (0, numel) if bucket.owner == self.rank else (0, 0)
        return self.rank * numel // self.ranks, (self.rank + 1) * numel // self.ranks

    @torch.no_grad()
    def sync_params(self) -> None:
        """Send the updated parameters of each rank to all ranks; called by every rank. All exchanges run at
        the same time, because they need no buffers."""
        waits = []
        for bucket in self.buckets:
            if bucket.owner is None:
                first, last = self.part_of(bucket)
                transport = self._transport or default_transport(self.group, bucket.flat.device)
                waits.append(transport.all_gather(bucket.flat, bucket.flat[first:last], self.group))
            else:
                work = dist.broadcast(bucket.flat, group=self.group, group_src=bucket.owner, async_op=True)
                assert work is not None
                waits.append(work.wait)
        for wait in waits:
            wait()
        for bucket in self.buckets:  # so that autograd detects the change of parameters that it has saved
            increment_version([entry.param for entry in bucket.entries])


def _check_no_overlap(params: Sequence[nn.Parameter]) -> None:
    """Raise if two parameters share memory, because they would not be tied after the move."""
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
                raise UserError(
                    f"two parameters, {shapes}, share memory: "
                    "tie them by assigning one nn.Parameter to both modules",
                )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
