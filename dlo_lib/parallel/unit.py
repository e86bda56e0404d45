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

from dlo_lib.parallel.pool import Pool
from dlo_lib.parallel.units import Place, Plan
from dlo_lib.parallel.wire import Wire


class State(enum.Enum):
    """Of a unit's parameters on this rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


@dataclass(eq=False)
class Slot:
    """One parameter of a unit. ``offset`` and ``numel`` are those of its part, padding included, in a rank's row."""

    name: str
    owners: list[tuple[nn.Module, str]]
    offset: int
    numel: int
    shard: nn.Parameter
    whole: nn.Parameter
    parts: Tensor
    """The memory of ``whole`` as (ranks, numel): a row is what one rank keeps."""
    arrived: bool = False
    """Backward has brought its gradient since the pass began,"""
    filled: bool = False
    """or a pass before, that was not reduced."""


@dataclass(frozen=True)
class Layout:
    """How units are kept: in which group, where, and in which dtypes they travel (None: the parameter's own)."""

    group: dist.ProcessGroup
    wire: Wire
    pool: Pool
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
        self._kept: Tensor | None = None  # the larger share
        self._version = -1  # of the shards, when they were last gathered
        dtype = plan.places[0].param.dtype
        self.compute_dtype, self.reduce_dtype = layout.compute_dtype or dtype, layout.reduce_dtype or dtype
        rows = [-(-place.param.shape[:1].numel() // self.ranks) for place in plan.places]
        self._sizes = [count * place.param.shape[1:].numel() for count, place in zip(rows, plan.places)]
        self.shards = torch.zeros(sum(self._sizes), dtype=dtype, device=layout.shard_device)
        self.slots: list[Slot] = []
        offset = 0
        for place, size in zip(plan.places, self._sizes):
            self.slots.append(self._slot(place, offset, size, values(place.param)))
            offset += size
        self.trained = [slot for slot in self.slots if slot.shard.requires_grad]  # the first ones: see Plan
        self.trained_numel = sum(slot.numel for slot in self.trained)
        self.missing = len(self.trained)  # gradients of this pass that have not arrived
        self._packed: Tensor | None = None
        self._packs: dict[Slot, list[tuple[Tensor, slice]]] = {}
        self._reduced: Tensor | None = None
        self._put(whole=False)

    @torch.no_grad()
    def _slot(self, place: Place, offset: int, size: int, value: Tensor) -> Slot:
        param, part = place.param, self._part(value)
        mine = self.shards[offset : offset + part.numel()].view(part.shape)
        mine.copy_(part)
        shard = nn.Parameter(mine, requires_grad=param.requires_grad)
        shard.shard_of = param.shape  # type: ignore[attr-defined]
        flat = torch.empty(self.ranks * size, dtype=self.compute_dtype, device=self.layout.device)
        # .data: with the same version counter, refilling the memory would count as a change of what autograd has saved.
        whole = nn.Parameter(flat[: param.numel()].view(param.shape).data, requires_grad=param.requires_grad)
        _shrink(flat)
        return Slot(place.name, place.owners, offset, size, shard, whole, flat.view(self.ranks, size))

    def _part(self, value: Tensor) -> Tensor:
        """The rows of ``value`` that this rank keeps."""
        count = value.shape[:1].numel()  # of a number: 1
        rows = -(-count // self.ranks)
        return value.reshape(count, *value.shape[1:])[self.rank * rows : (self.rank + 1) * rows]

    def _put(self, whole: bool) -> None:
        for slot in self.slots:
            chosen = slot.whole if whole else slot.shard
            for module, attribute in slot.owners:
                module._parameters[attribute] = chosen

    @torch.no_grad()
    def start_gather(self) -> None:
        """Send this rank's shards and begin to receive the others'; nothing to do for what is whole or on its way."""
        if self.state is not State.SHARDED:
            return
        if self._version != self.shards._version:
            self._kept = None  # an optimiser has stepped meanwhile
        self.state, self._version = State.GATHERING, self.shards._version
        if self._kept is not None and self.layout.smaller_group is not None:
            mine, group = self._kept, self.layout.smaller_group
        else:
            mine, group = self.shards.to(self.layout.device, self.compute_dtype), self.layout.group
        self._gathering = self.layout.wire.gather_rows(mine, group, self.layout.pool)

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the parameters whole, waiting for the others if need be."""
        if self.state is not State.SHARDED and self._version != self.shards._version:
            self.free()  # an optimiser has stepped meanwhile
        if self.state is State.WHOLE:
            return
        self.start_gather()
        self._gathering.wait()
        for slot in self.slots:
            _grow(slot.parts)
        first = 0
        for some in self._gathering.rows:
            rows = some.view(some.numel() // max(1, self.shards.numel()), self.shards.numel())
            parts = [slot.parts[first : first + len(rows)] for slot in self.slots]
            torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=parts)
            first += len(rows)
        self._kept = None
        self._end_gather()
        self._put(whole=True)
        self.state = State.WHOLE

    def _end_gather(self) -> None:
        self.layout.pool.give(self._gathering.lent)
        del self._gathering

    @torch.no_grad()
    def free(self, until_backward: bool = False) -> None:
        """Keep the shards alone; until backward the larger share as well, where there is a smaller group."""
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self._gathering.wait()
            self._end_gather()
            self.state = State.SHARDED
            return
        if until_backward and (group := self.layout.smaller_group) is not None:
            rows = self.ranks // dist.get_world_size(group)
            first = dist.get_rank(group) * rows
            self._kept = torch.cat([slot.parts[first : first + rows] for slot in self.slots], dim=1).view(-1)
        self._put(whole=False)
        for slot in self.slots:
            _shrink(slot.parts)
        self.state = State.SHARDED

    @torch.no_grad()
    def pack(self, slot: Slot, gradient: Tensor) -> None:
        """Copy, or add, a whole gradient to those that will be reduced."""
        flat = gradient.reshape(-1)
        for target, part in self._packs_of(slot):
            source = flat[part].view(target.shape)
            target.add_(source) if slot.filled else target.copy_(source)
        self.missing -= not slot.arrived
        slot.arrived = slot.filled = True

    def _packs_of(self, slot: Slot) -> list[tuple[Tensor, slice]]:
        """Where a gradient goes: places in the packed gradients, and which elements of the flat gradient each takes."""
        if self._packed is None:
            self._packed = self.layout.pool.take(self.ranks * self.trained_numel, self.reduce_dtype)
            if any(slot.parts.numel() > slot.whole.numel() for slot in self.trained):
                self._packed.zero_()  # the padding, which is sent along
        if slot not in self._packs:
            full, rest = divmod(slot.whole.numel(), slot.numel) if slot.numel else (0, 0)  # ranks with all rows, elements of the next one
            rows = self._packed.view(self.ranks, -1)[:, slot.offset : slot.offset + slot.numel]
            self._packs[slot] = [(rows[:full], slice(0, full * slot.numel))]
            if rest:
                self._packs[slot].append((rows[full, :rest], slice(full * slot.numel, None)))
        return self._packs[slot]

    @torch.no_grad()
    def start_reduce(self) -> list[Slot]:
        """Send the packed gradients to their owners, zeros where there are none; those slots are returned."""
        absent = [slot for slot in self.trained if not slot.filled]
        for slot in absent:
            for target, _ in self._packs_of(slot):
                target.zero_()
        assert self._packed is not None
        self._reduced = torch.empty(self.trained_numel, dtype=self.reduce_dtype, device=self.layout.device)
        self._summed = self.layout.wire.reduce_scatter(self._reduced, self._packed, self.layout.group, self.layout.pool)
        for slot in self.trained:
            slot.filled = False
        return absent

    @torch.no_grad()
    def settle_reduce(self) -> None:
        """Wait for the sum and make it the mean; where shards have replicas, begin to sum over them."""
        assert self._reduced is not None
        self._summed()
        del self._summed  # and with it what was sent
        replicas = self.layout.replicas
        self._reduced.mul_(1 / (self.ranks * (dist.get_world_size(replicas) if replicas is not None else 1)))
        if replicas is not None:
            self._summed = dist.all_reduce(self._reduced, group=replicas, async_op=True).wait
        self._give_packed()

    @torch.no_grad()
    def hand_over(self, unused: set[Slot]) -> None:
        """Leave the means in ``.grad`` of the shards, or add them; nothing for parameters in ``unused``."""
        assert self._reduced is not None
        if self.layout.replicas is not None:
            self._summed()
        means = self._reduced.to(self.shards.device, self.shards.dtype)
        for slot in self.trained:
            mean = means[slot.offset : slot.offset + slot.shard.numel()].view(slot.shard.shape)
            if slot.shard.grad is not None:
                slot.shard.grad.add_(mean)
            elif slot not in unused:
                slot.shard.grad = mean
        self._reduced = None

    def drop_gradients(self) -> None:
        """Forget what is packed."""
        self._reduced = None
        self._give_packed()
        for slot in self.trained:
            slot.filled = False

    def _give_packed(self) -> None:
        if self._packed is not None:
            self.layout.pool.give(self._packed)
            self._packed = None
            self._packs.clear()

    def end_pass(self) -> None:
        """As before the first gradient of a backward pass; what is packed and not reduced stays."""
        self.missing = len(self.trained)
        for slot in self.trained:
            slot.arrived = False

    @torch.no_grad()
    def gather_exactly(self) -> list[Tensor]:
        """The parameters whole, in the dtype of the shards, apart from what computes; freed with the last reference to them."""
        mine = self.shards.to(self.layout.device)
        by_rank = torch.empty(self.ranks * mine.numel(), dtype=mine.dtype, device=mine.device)
        self.layout.wire.all_gather(by_rank, mine, self.layout.group)()
        flat = [parts.reshape(-1) for parts in by_rank.view(self.ranks, -1).split(self._sizes, dim=1)]
        return [value[: slot.whole.numel()].view(slot.whole.shape) for slot, value in zip(self.slots, flat)]

    @torch.no_grad()
    def load(self, slot: Slot, value: Tensor) -> None:
        """Take this rank's rows of a parameter's full ``value``."""
        slot.shard.copy_(self._part(value))


def _grow(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _shrink(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
