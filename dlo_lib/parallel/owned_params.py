"""Optimisers that need whole parameters, for models whose ranks hold parts: FSDP and tensor parallelism.

Muon needs the whole matrix, SOAP and Adafactor its rows and columns. Each parameter gets an *owner*, one of
the ranks that hold parts of it. In a step

    parts of gradient and parameter -> owner  |  the owner updates the whole parameter  |  parts -> all ranks

The owners are chosen so that they have about the same number of elements. The optimiser's state exists once,
at the owners, and so does a copy of the parameters. What the ranks hold counts: a parameter that was loaded
meanwhile is gathered as it is.

Bytes that a rank sends in a step, f = (N - 1) / N of N ranks: 2 B_p / N f for the parts, and B_p / N f for
the updates, where an elementwise optimiser sends nothing. Memory: B_p / N and the state for what a rank owns.

Dion and the distributed Muon of PyTorch's users do the same with whole matrices. An optimiser that needs only
norms of parameters, as LAMB, sends those (``parallel.whole_norms``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.protocol import MemoryObserver, ParamShard, ShardBox, SplitDim, shard_groups
from dlo_lib.parallel.sharding.sharded_grad import plain

_PARAM_KEYS = ("params", "param_names")
_ROUND_BYTES = 64 << 20
"""Of the parameters whose parts are exchanged together."""


@dataclass(frozen=True)
class _Held:
    """What a rank holds of a parameter: the boxes, the shape of its part, and whether it sends it."""

    boxes: tuple[ShardBox, ...]
    shape: tuple[int, ...]
    sends: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class _Param:
    """A parameter, and what each rank of the group holds of it. ``whole`` is None on ranks that do not own
    it."""

    shard: ParamShard
    ranks: tuple[_Held, ...]
    owner: int
    whole: nn.Parameter | None

    def write(self, whole: Tensor, rank: int, part: Tensor) -> None:
        """Write the part of ``rank``, flat, to its place in ``whole``."""
        local = part.view(self.ranks[rank].shape)
        for box in self.ranks[rank].boxes:
            whole[_slices(box.whole, box.sizes)] = local[_slices(box.part, box.sizes)]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of ``rank`` of ``whole``, flat."""
        held = self.ranks[rank]
        local = whole.new_empty(held.shape)
        for box in held.boxes:
            local[_slices(box.part, box.sizes)] = whole[_slices(box.whole, box.sizes)]
        return local.flatten()


class OwnerOptimizer(torch.optim.Optimizer):
    """Updates the parameters of a sharded model as ``optimizer_cls(params, **options)`` would update whole
    ones. ``param_groups`` have the parts of this rank, so that learning-rate schedulers work unchanged.

    Args:
        params: the parameters of this rank, or parameter groups, in the same order on every rank.
        optimizer_cls: a class whose update of a parameter depends on that parameter only.
        shards: of the model on this rank.
        group: the ranks that together hold every parameter once or more.
        options: keyword arguments of ``optimizer_cls``.

    Raises:
        UserError: a parameter is not among ``shards``, or is cut into flat ranges (ZeRO 1 and 2).
    """

    updates_shards = True  # the optimisers of shards accept it (sharding.elementwise)
    updates_each_param = True
    holds_parts = True  # what is kept of a part, such as an average of the weights, is in ``state``

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        shards: Iterable[ParamShard],
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        super().__init__(params, options)
        by_param = {shard.param: shard for shard in shards}
        every = [param for held in self.param_groups for param in held["params"]]
        if any(param not in by_param for param in every):
            raise UserError("the optimiser has parameters that the model has not: give it those of the model")
        self._params = self._assigned([by_param[param] for param in every])
        own = {param.shard.param: param.whole for param in self._params if param.whole is not None}
        groups = []
        for held in self.param_groups:
            # Optimisers refuse empty groups.
            mine = [own[param] for param in held["params"] if param in own] or [_nothing(every[0])]
            rest = {key: value for key, value in held.items() if key not in _PARAM_KEYS}
            groups.append({**rest, "params": mine})
        self.local: torch.optim.Optimizer = optimizer_cls(groups, **options)
        """The optimiser of the whole parameters that this rank owns."""
        for held, inner in zip(self.param_groups, self.local.param_groups):
            for key, value in inner.items():
                held.setdefault(key, value)

    def _assigned(self, shards: Sequence[ParamShard]) -> list[_Param]:
        """Return the parameters with their owners, which all ranks choose equally."""
        coordinates = [coordinates_in(self._group, rank, shards) for rank in range(self._ranks)]
        every = [[_held(shard, ranks) for shard in shards] for ranks in coordinates]
        load = [0] * self._ranks
        owners = [0] * len(shards)
        for number in sorted(range(len(shards)), key=lambda one: (-shards[one].shape.numel(), one)):
            senders = [rank for rank in range(self._ranks) if every[rank][number].sends]
            owners[number] = min(senders, key=lambda rank: load[rank])
            load[owners[number]] += shards[number].shape.numel()
        found = []
        for number, shard in enumerate(shards):
            ranks, owner = tuple(held[number] for held in every), owners[number]
            whole = nn.Parameter(shard.param.new_empty(shard.shape)) if owner == self._rank else None
            found.append(_Param(shard, ranks, owner, whole))
        return found

    def observe_memory(self, observer: MemoryObserver) -> None:
        """Report the whole parameters that this rank owns."""
        observer.weights(param.whole for param in self._params if param.whole is not None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters; called by every rank.

        Args:
            closure: computes the gradients and returns the loss, which is the result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for held, own in zip(self.param_groups, self.local.param_groups):
            own.update((key, value) for key, value in held.items() if key not in _PARAM_KEYS)
        # A part without elements has no gradient; its owner, which has elements, knows.
        stepped = [param for param in self._params if param.shard.param.grad is not None]
        for some in self._rounds(stepped):
            self._gather(some)
        self.local.step()
        self.local.zero_grad(set_to_none=True)
        for some in self._rounds(stepped):
            self._spread(some)
        for held, own in zip(self.param_groups, self.local.param_groups):
            held.update((key, value) for key, value in own.items() if key not in _PARAM_KEYS)
        return loss

    def _rounds(self, stepped: Sequence[_Param]) -> Iterator[list[_Param]]:
        """Yield parameters that are exchanged together, of one dtype and about ``_ROUND_BYTES`` of a rank.
        The rounds are made of all parameters, so that they are those of every rank."""
        has_grad = set(map(id, stepped))
        dtypes = list(dict.fromkeys(param.shard.param.dtype for param in self._params))
        for dtype in dtypes:
            some, size = list[_Param](), 0
            for param in (param for param in self._params if param.shard.param.dtype is dtype):
                some.append(param)
                size += param.shard.shape.numel() * dtype.itemsize // self._ranks
                if size >= _ROUND_BYTES:
                    yield [param for param in some if id(param) in has_grad or not _elements(param)]
                    some, size = [], 0
            if some:
                yield [param for param in some if id(param) in has_grad or not _elements(param)]

    def _gather(self, some: Sequence[_Param]) -> None:
        """Send the gradients and parameters to their owners, and set them there."""
        if not some:
            return
        to: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for param in some:
            if param.ranks[self._rank].sends:
                local = param.shard.param
                assert local.grad is not None
                to[param.owner] += [plain(local.grad).to(local.dtype).flatten(), local.detach().flatten()]
        owned = [param for param in some if param.whole is not None]
        sizes = [
            2 * sum(param.ranks[rank].numel for param in owned if param.ranks[rank].sends)
            for rank in range(self._ranks)
        ]
        arrived = self._exchanged(to, sizes, some[0].shard.param)
        for param in owned:
            assert param.whole is not None
            param.whole.grad = torch.empty_like(param.whole)
        for rank, received in enumerate(arrived):
            start = 0
            for param in (param for param in owned if param.ranks[rank].sends):
                assert param.whole is not None
                assert param.whole.grad is not None
                for target in (param.whole.grad, param.whole.detach()):
                    end = start + param.ranks[rank].numel
                    param.write(target, rank, received[start:end])
                    start = end

    def _spread(self, some: Sequence[_Param]) -> None:
        """Send each rank its parts of the updated parameters."""
        if not some:
            return
        owned = [param for param in some if param.whole is not None]
        to = [
            [param.part(param.whole.detach(), rank) for param in owned if param.whole is not None]
            for rank in range(self._ranks)
        ]
        sizes = [
            sum(param.ranks[self._rank].numel for param in some if param.owner == rank)
            for rank in range(self._ranks)
        ]
        for rank, received in enumerate(self._exchanged(to, sizes, some[0].shard.param)):
            start = 0
            for param in (param for param in some if param.owner == rank):
                local = param.shard.param
                end = start + local.numel()
                local.copy_(received[start:end].view(local.shape))
                start = end

    def _exchanged(self, to: Sequence[Sequence[Tensor]], sizes: list[int], like: Tensor) -> Sequence[Tensor]:
        """Send ``to[rank]`` to each rank, and return what each of them sent, ``sizes[rank]`` elements."""
        outgoing = torch.cat([part for parts in to for part in parts] or [like.new_empty(0)])
        incoming = outgoing.new_empty(sum(sizes))
        sent = [sum(part.numel() for part in parts) for parts in to]
        dist.all_to_all_single(incoming, outgoing, sizes, sent, group=self._group)
        return incoming.split(sizes)

    def shards(self, whole: Iterable[ParamShard]) -> list[ParamShard]:
        """Return the whole parameters that this rank owns, for checkpoints of their state."""
        return [
            replace(param.shard, placement=(), param=param.whole)
            for param in self._params
            if param.whole is not None
        ]

    @torch.no_grad()
    def load_local_state(
        self, values: Mapping[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]
    ) -> None:
        """Set the state of what this rank owns, and what it keeps of its parts.

        Args:
            values: the state by whole parameter or part, and key.
            groups: the hyper-parameters of each parameter group.
        """
        parts = [param for held in self.param_groups for param in held["params"]]
        self.state.clear()
        self.state.update({param: dict(values[param]) for param in parts if values.get(param)})
        inner = [param for own in self.local.param_groups for param in own["params"]]
        numbers = {param: number for number, param in enumerate(inner)}
        self.local.load_state_dict(
            {
                "state": {numbers[param]: values[param] for param in inner if values.get(param)},
                "param_groups": [
                    {**group, "params": [numbers[param] for param in own["params"]]}
                    for group, own in zip(groups, self.local.param_groups)
                ],
            }
        )
        for held, own in zip(self.param_groups, self.local.param_groups):
            held.update((key, value) for key, value in own.items() if key not in _PARAM_KEYS)

    def state_dict(self) -> Any:
        raise UserError(
            "the state of one rank is not a checkpoint: use parallel.checkpoint.save_sharded",
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise UserError("the state of one rank is not a checkpoint: use parallel.checkpoint.load_sharded")


def _elements(param: _Param) -> bool:
    return param.shard.param.numel() > 0


def coordinates_in(
    group: dist.ProcessGroup, rank: int, shards: Iterable[ParamShard]
) -> dict[dist.ProcessGroup, int]:
    """Return the rank of ``rank`` of ``group`` in each group over which ``shards`` are cut.

    Where that rank is in another group of the same dimension, it is its rank in that one. ``group`` is a grid
    of ranks, as ``ParallelMesh.group_along`` returns it, and the groups of the shards are lines of the grid.
    """
    number = {each: place for place, each in enumerate(dist.get_process_group_ranks(group))}
    found = {}
    for line in shard_groups(shards):
        places = [number[each] for each in dist.get_process_group_ranks(line)]
        stride = places[1] - places[0] if len(places) > 1 else 1
        found[line] = rank // stride % len(places)
    return found


def _held(shard: ParamShard, ranks: Mapping[dist.ProcessGroup, int]) -> _Held:
    """Return what the rank with these ranks in the groups of ``shard`` holds. The placement of a parameter is
    the same on every rank, so this needs no message."""
    boxes = [box for box in shard.boxes(ranks) if math.prod(box.sizes)]
    if not boxes:
        return _Held((), (0,), False)
    splits = [split for split in shard.placement if isinstance(split, SplitDim)]
    sends = all(ranks[split.group] % split.copies == 0 for split in splits)
    if not shard.shape:
        one = (1,) * shard.param.dim()
        return _Held((ShardBox((), (0,) * len(one), one),), one, sends)
    ends = [tuple(start + size for start, size in zip(box.part, box.sizes)) for box in boxes]
    return _Held(tuple(boxes), tuple(max(dim) for dim in zip(*ends)), sends)


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def _nothing(like: Tensor) -> nn.Parameter:
    return nn.Parameter(like.detach().new_empty(0))
