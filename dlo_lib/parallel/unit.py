"""A unit of sharded parameters: what a rank keeps of it, how it becomes whole, how its gradients become shards. FSDP says when.

Each parameter is cut along its first dimension into N parts of ceil(d0/N) rows, the last ones padded or empty; rank r keeps the r-th of
each, packed one behind the other. So one all-gather brings all parts of the unit, rank by rank; a copy sorts them into whole parameters;
one reduce-scatter takes gradients packed in the same order to the ranks that own them.

    packed by rank      [ A0 B0 C0 | A1 B1 C1 | ... ]   N rows of S elements
    sorted              [ A0 A1 ... | B0 B1 ... | C0 C1 ... ]

A whole parameter is always the same tensor: being freed, its storage shrinks to nothing, and what autograd has saved of it is filled again
when it is gathered for backward. A flat buffer over parameter boundaries would spare the sorting, but cut matrices in the middle of a row.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.parallel.units import Place, Plan
from dlo_lib.parallel.wire import all_gather, reduce_scatter


class State(enum.Enum):
    """Of a unit's parameters on this rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


@dataclass(eq=False)
class Slot:
    """One parameter of a unit. ``offset`` and ``numel`` are those of its part, padding included, in a rank's row."""

    place: Place
    offset: int
    numel: int
    shard: nn.Parameter
    whole: nn.Parameter
    packs: list[tuple[Tensor, slice]]
    """Where its gradient goes: views of the packed gradients, and which elements of the flat gradient each takes."""
    arrived: bool = False
    """Backward has brought its gradient since the pass began,"""
    filled: bool = False
    """or a pass before, that was not reduced."""


@dataclass(frozen=True)
class Layout:
    """How units are kept: in which group, where, and in which dtypes they travel (None: the parameter's own)."""

    group: dist.ProcessGroup
    device: torch.device
    shard_device: torch.device
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    replicas: dist.ProcessGroup | None
    """Ranks that hold the same shards: gradients are summed over them as well."""
    smaller_group: dist.ProcessGroup | None
    """Where each rank keeps a larger share between forward and backward."""


class Unit:
    """Parameters that are gathered, freed and reduced together.

    Args:
        plan: the modules and parameters; these are replaced in their modules by the shards.
        layout: see there.
        values: the full value of a parameter, asked for one at a time.
    """

    def __init__(self, plan: Plan, layout: Layout, values: Callable[[nn.Parameter], Tensor]) -> None:
        self.name, self.runs, self.layout = plan.name, plan.runs, layout
        self.ranks, self.rank = dist.get_world_size(layout.group), dist.get_rank(layout.group)
        self.state = State.SHARDED
        self._work: dist.Work | None = None
        self._kept: Tensor | None = None
        self._sending: Tensor | None = None
        dtype = plan.places[0].param.dtype
        compute_dtype = layout.compute_dtype or dtype
        rows = [-(-(place.param.shape[:1].numel()) // self.ranks) for place in plan.places]
        sizes = [count * place.param.shape[1:].numel() for count, place in zip(rows, plan.places)]
        trained = sum(size for size, place in zip(sizes, plan.places) if place.param.requires_grad)
        self.shards = torch.zeros(sum(sizes), dtype=dtype, device=layout.shard_device)
        self.whole = torch.empty(self.ranks * sum(sizes), dtype=compute_dtype, device=layout.device)
        # With one parameter, or on one rank, both orders are the same.
        self._by_rank = self.whole if self.ranks == 1 or len(sizes) == 1 else torch.empty_like(self.whole)
        self.packed = torch.empty(self.ranks * trained, dtype=layout.reduce_dtype or dtype, device=layout.device)
        self.slots: list[Slot] = []
        offset = 0
        for place, count, size in zip(plan.places, rows, sizes):
            self.slots.append(self._slot(place, offset, count, size, values))
            offset += size
        self._sizes = sizes
        self._sorted = [self._in_whole(slot).view(self.ranks, slot.numel) for slot in self.slots]
        self.trained = [slot for slot in self.slots if slot.place.param.requires_grad]
        self._padded = any(slot.numel * self.ranks != slot.whole.numel() for slot in self.trained)
        self.missing = len(self.trained)
        self._reduced: Tensor | None = None
        for buffer in (self.whole, self._by_rank, self.packed):
            _shrink(buffer)
        self._put(whole=False)

    def _slot(self, place: Place, offset: int, rows: int, size: int, values: Callable[[nn.Parameter], Tensor]) -> Slot:
        param, shape = place.param, place.param.shape
        with torch.no_grad():
            part = self._part(values(param), rows)
            mine = self.shards[offset : offset + part.numel()].view(part.shape)
            mine.copy_(part)
        shard = nn.Parameter(mine, requires_grad=param.requires_grad)
        shard.shard_of = shape  # type: ignore[attr-defined]
        start = self.ranks * offset
        # .data: without a version of its own, refilling the storage would count as a change of what autograd has saved.
        whole = nn.Parameter(self.whole[start : start + shape.numel()].view(shape).data, requires_grad=param.requires_grad)
        packs = []
        if param.requires_grad:
            full, rest = divmod(shape.numel(), size) if size else (0, 0)
            by_rank = self.packed.view(self.ranks, -1)[:, offset : offset + size]
            packs = [(by_rank[:full], slice(0, full * size)), (by_rank[full : full + 1, :rest], slice(full * size, None))]
            packs = packs[: 1 + (rest > 0)]
        return Slot(place, offset, size, shard, whole, packs)

    def _in_whole(self, slot: Slot) -> Tensor:
        start = self.ranks * slot.offset
        return self.whole[start : start + self.ranks * slot.numel]

    def _put(self, whole: bool) -> None:
        for slot in self.slots:
            chosen = slot.whole if whole else slot.shard
            for module, attribute in slot.place.owners:
                module._parameters[attribute] = chosen

    @torch.no_grad()
    def start_gather(self) -> None:
        """Send this rank's shards and begin to receive the others'; nothing to do for what is whole or on its way."""
        if self.state is not State.SHARDED:
            return
        self.state = State.GATHERING
        self._version = self.shards._version
        if self._kept is not None and self.layout.smaller_group is not None:
            self._sending, self._receiving, group = self._kept, self.whole, self.layout.smaller_group
        else:
            self._sending, self._receiving, group = self.shards.to(self.layout.device, self.whole.dtype), self._by_rank, self.layout.group
        _grow(self._receiving)
        self._work = all_gather(self._receiving, self._sending, group)

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the parameters whole, waiting for the others if need be."""
        if self.state is State.WHOLE and self._version == self.shards._version:
            return
        if self.state is State.WHOLE:  # an optimiser has stepped meanwhile
            self.free()
        self.start_gather()
        assert self._work is not None
        self._work.wait()
        self._work = self._kept = self._sending = None
        if self._receiving is not self.whole:
            _grow(self.whole)
            torch.split_with_sizes_copy(self._by_rank.view(self.ranks, -1), self._sizes, dim=1, out=self._sorted)
            _shrink(self._by_rank)
        self._put(whole=True)
        self.state = State.WHOLE

    @torch.no_grad()
    def free(self, until_backward: bool = False) -> None:
        """Keep the shards alone; until backward, the larger share of the smaller group as well, if there is one."""
        if self.state is State.GATHERING:
            self.unshard()
        if self.state is State.SHARDED:
            return
        if until_backward and (smaller := self.layout.smaller_group) is not None:
            self._kept = self.whole.view(dist.get_world_size(smaller), -1)[dist.get_rank(smaller)].clone()
        self._put(whole=False)
        _shrink(self.whole)
        self.state = State.SHARDED

    @torch.no_grad()
    def gather_exactly(self) -> list[Tensor]:
        """The parameters whole, in the dtype of the shards, apart from what computes; freed with the last reference to them."""
        mine = self.shards.to(self.layout.device)
        by_rank = torch.empty(self.ranks * mine.numel(), dtype=mine.dtype, device=mine.device)
        all_gather(by_rank, mine, self.layout.group).wait()
        parts = by_rank.view(self.ranks, -1)
        flat = [parts[:, slot.offset : slot.offset + slot.numel].reshape(-1) for slot in self.slots]
        return [value[: slot.whole.numel()].view(slot.whole.shape) for slot, value in zip(self.slots, flat)]

    def part_of(self, slot: Slot, value: Tensor) -> Tensor:
        """The rows of ``value``, shaped as the parameter, that this rank keeps, shaped as the shard."""
        return self._part(value, -(-value.shape[:1].numel() // self.ranks))

    def _part(self, value: Tensor, rows: int) -> Tensor:
        return value.reshape(value.shape[:1].numel(), *value.shape[1:])[self.rank * rows : (self.rank + 1) * rows]

    @torch.no_grad()
    def pack(self, slot: Slot, gradient: Tensor) -> None:
        """Copy, or add, a whole gradient to those that will be reduced."""
        if not self.packed.untyped_storage().size():
            _grow(self.packed)
            if self._padded:
                self.packed.zero_()
        flat = gradient.reshape(-1)
        for target, part in slot.packs:
            source = flat[part].view(target.shape)
            target.add_(source) if slot.filled else target.copy_(source)
        self.missing -= not slot.arrived
        slot.arrived = slot.filled = True

    @torch.no_grad()
    def start_reduce(self) -> list[Slot]:
        """Send the packed gradients to their owners, zeros where there are none; those slots are returned."""
        if not self.packed.untyped_storage().size():
            _grow(self.packed)
        absent = [slot for slot in self.trained if not slot.filled]
        for slot in absent:
            for target, _ in slot.packs:
                target.zero_()
        self._reduced = torch.empty(self.packed.numel() // self.ranks, dtype=self.packed.dtype, device=self.packed.device)
        self._work_of_reduce = reduce_scatter(self._reduced, self.packed, self.layout.group)
        for slot in self.trained:
            slot.filled = False
        return absent

    @torch.no_grad()
    def settle_reduce(self) -> None:
        """Wait for the sum and make it the mean; where shards have replicas, begin to sum over them."""
        assert self._reduced is not None
        self._work_of_reduce.wait()
        _shrink(self.packed)
        replicas = self.layout.replicas
        self._reduced.mul_(1 / (self.ranks * (dist.get_world_size(replicas) if replicas is not None else 1)))
        if replicas is not None:
            self._work_of_reduce = dist.all_reduce(self._reduced, group=replicas, async_op=True)

    @torch.no_grad()
    def hand_over(self, unused: set[Slot]) -> None:
        """Leave the means in ``.grad`` of the shards, or add them; nothing for parameters in ``unused``."""
        assert self._reduced is not None
        if self.layout.replicas is not None:
            self._work_of_reduce.wait()
        means = self._reduced.to(self.shards.device, self.shards.dtype)
        for slot in self.trained:
            mean = means[slot.offset : slot.offset + slot.shard.numel()].view(slot.shard.shape)
            if slot.shard.grad is not None:
                slot.shard.grad.add_(mean)
            elif slot not in unused:
                slot.shard.grad = mean
        self._reduced = None

    def drop_gradients(self) -> None:
        """Forget what is packed or on its way."""
        self._reduced = None
        _shrink(self.packed)
        for slot in self.trained:
            slot.filled = False

    def end_pass(self) -> None:
        """As before the first gradient of a backward pass; what is packed and not reduced stays."""
        self.missing = len(self.trained)
        for slot in self.trained:
            slot.arrived = False


def _grow(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _shrink(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
