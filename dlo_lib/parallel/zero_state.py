"""The state of a sharded optimiser as one that is not sharded: what the wrapped class would have in its ``state_dict``, and back.

A state that has the shape of its piece is a piece itself (a moment); others (a count of steps) are the same on all ranks that have them.
Where updated copies of the parameters are kept in a wider dtype, these are state as well, under ``MASTER``.

Cost: bucket by bucket each rank sends what it owns to all others. The whole state appears on every rank's CPU: for models too large for
that there is ``parallel.sharded_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.parallel.partition import Piece

if TYPE_CHECKING:
    from dlo_lib.parallel.zero import ShardedOptimizer

MASTER = "master"
"""The key of a parameter's copy in ``master_dtype``."""


def is_piece(value: object, piece: Piece) -> bool:
    """Whether a state is a part as the piece is, and not one value for all."""
    return isinstance(value, Tensor) and value.shape == piece.shard.shape


def local_state(optimizer: ShardedOptimizer, piece: Piece) -> dict[str, Any]:
    """What this rank keeps for ``piece``, by key."""
    assert optimizer.local is not None
    state = dict(optimizer.local.state.get(piece.shard, {}))
    if state and piece.shard.dtype is not piece.param.dtype:
        state[MASTER] = piece.shard.detach()
    return state


def full_state_dict(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """See ``ShardedOptimizer.full_state_dict``."""
    order = {param: number for number, param in enumerate(_params(optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for bucket in optimizer.partition.buckets:
        mine: list[tuple[int, int, dict[str, Any]]] = []
        for number, place in enumerate(bucket.places):
            piece = optimizer.partition.pieces.get(place.param)
            if piece is not None and place.param in order:
                held = {key: _flat(value, piece) for key, value in local_state(optimizer, piece).items()}
                mine.append((number, piece.start, held))
        everyones: list[Any] = [None] * optimizer.partition.ranks
        dist.all_gather_object(everyones, mine, group=optimizer.partition.group)
        for number, start, held in (entry for entries in everyones for entry in entries):
            place = bucket.places[number]
            whole = state.setdefault(order[place.param], {})
            for key, (value, flat) in held.items():
                if not flat:
                    whole.setdefault(key, value)
                    continue
                if key not in whole:
                    whole[key] = torch.empty_strided(place.param.shape, place.strides, dtype=value.dtype)
                whole[key].as_strided((len(value),), (1,), start).copy_(value)
    groups, first = [], 0
    for held in optimizer.param_groups:
        numbers = list(range(first, first + len(held["params"])))
        groups.append({**held, "params": numbers})
        first += len(numbers)
    return {"state": {number: held for number, held in sorted(state.items()) if held}, "param_groups": groups}


def load_full_state_dict(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """See ``ShardedOptimizer.load_full_state_dict``."""
    saved, own = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        raise UserError("the state is of other groups of parameters: make the optimiser as when it was saved")
    numbers = [number for group in saved for number in group["params"]]
    whole = {param: state["state"].get(number, {}) for param, number in zip(_params(optimizer), numbers)}
    values = {}
    for piece in optimizer.pieces():
        values[piece.shard] = {
            key: piece.of(value).clone() if isinstance(value, Tensor) and value.shape == piece.param.shape else value
            for key, value in whole[piece.param].items()
        }
    put_back(optimizer, values, [{key: value for key, value in group.items() if key != "params"} for group in saved])


@torch.no_grad()
def put_back(optimizer: ShardedOptimizer, values: Mapping[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Set the state of this rank's pieces, by shard, and the hyper-parameters of the groups."""
    local = optimizer.local
    assert local is not None
    for piece in optimizer.pieces():
        held = values.get(piece.shard, {})
        master = held.pop(MASTER, None)
        if piece.shard.data_ptr() != piece.mine.data_ptr():
            piece.shard.copy_(piece.mine if master is None else master)
    numbers = {shard: number for number, shard in enumerate(shard for own in local.param_groups for shard in own["params"])}
    local.load_state_dict(
        {
            "state": {numbers[shard]: held for shard, held in values.items() if held},
            "param_groups": [
                {**group, "params": [numbers[shard] for shard in own["params"]]} for group, own in zip(groups, local.param_groups)
            ],
        }
    )
    for held, own in zip(optimizer.param_groups, local.param_groups):
        held.update((key, value) for key, value in own.items() if key not in ("params", "param_names"))


def _params(optimizer: ShardedOptimizer) -> list[nn.Parameter]:
    return [param for held in optimizer.param_groups for param in held["params"]]


def _flat(value: Any, piece: Piece) -> tuple[Any, bool]:
    """A value on the CPU, and whether it is a piece, which then is flat in the order of memory."""
    if not is_piece(value, piece):
        return (value.cpu() if isinstance(value, Tensor) else value), False
    if piece.whole:
        laid_out = torch.empty_strided(piece.param.shape, piece.strides, dtype=value.dtype).copy_(value)
        return laid_out.as_strided((value.numel(),), (1,), 0), True
    return value.cpu(), True
