"""Converts the state of a sharded optimiser to the ``state_dict`` of the unsharded optimiser, and back.

A value with the shape of its piece, such as a moment, is a part of the whole value. Other values, such as the
number of steps, are equal on all ranks that have them. With a ``master_dtype``, the updated copies of the
parameters are part of the state, under the key ``MASTER``.

Cost: for each bucket, every rank sends its part to all others. The whole state is on the CPU of every rank;
for models that are too large for this, use ``parallel.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.zero.flat_params import Partition, Piece

MASTER = "master"
"""The key of the copy of a parameter in ``master_dtype``."""


class PieceOptimizer(Protocol):
    """The attributes of a ``ShardedOptimizer`` that this module uses."""

    local: torch.optim.Optimizer | None
    partition: Partition
    param_groups: list[dict[str, Any]]

    def pieces(self) -> list[Piece]: ...


def is_piece(value: object, piece: Piece) -> bool:
    """Return whether ``value`` has an element for each element of the piece."""
    return isinstance(value, Tensor) and value.shape == piece.shard.shape


def local_state(optimizer: PieceOptimizer, piece: Piece) -> dict[str, Any]:
    """Return the optimiser state that this rank stores for ``piece``, by key."""
    assert optimizer.local is not None
    state = dict(optimizer.local.state.get(piece.shard, {}))
    if state and piece.shard.dtype is not piece.param.dtype:
        state[MASTER] = piece.shard.detach()
    return state


def full_state_dict(optimizer: PieceOptimizer) -> dict[str, Any]:
    """See ``ShardedOptimizer.full_state_dict``."""
    order = {param: number for number, param in enumerate(_params(optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for bucket in optimizer.partition.buckets:
        mine: list[tuple[int, int, dict[str, Any]]] = []
        for number, entry in enumerate(bucket.entries):
            piece = optimizer.partition.pieces.get(entry.param)
            if piece is not None and entry.param in order:
                held = {key: _flat(value, piece) for key, value in local_state(optimizer, piece).items()}
                mine.append((number, piece.start, held))
        by_rank: list[Any] = [None] * optimizer.partition.ranks
        dist.all_gather_object(by_rank, mine, group=optimizer.partition.group)
        for number, start, held in (sent for items in by_rank for sent in items):
            entry = bucket.entries[number]
            whole = state.setdefault(order[entry.param], {})
            for key, (value, flat) in held.items():
                if not flat:
                    whole.setdefault(key, value)
                    continue
                if key not in whole:
                    whole[key] = torch.empty_strided(entry.param.shape, entry.strides, dtype=value.dtype)
                whole[key].as_strided((len(value),), (1,), start).copy_(value)
    groups, first = [], 0
    for held in optimizer.param_groups:
        numbers = list(range(first, first + len(held["params"])))
        groups.append({**held, "params": numbers})
        first += len(numbers)
    return {"state": {number: held for number, held in sorted(state.items()) if held}, "param_groups": groups}


def load_full_state_dict(optimizer: PieceOptimizer, state: Mapping[str, Any]) -> None:
    """See ``ShardedOptimizer.load_full_state_dict``."""
    saved, own = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        raise UserError(
            "the state has other groups of parameters: create the optimiser as when the state was saved"
        )
    numbers = [number for group in saved for number in group["params"]]
    whole = {param: state["state"].get(number, {}) for param, number in zip(_params(optimizer), numbers)}
    values = {}
    for piece in optimizer.pieces():
        values[piece.shard] = {
            key: piece.of(value).clone()
            if isinstance(value, Tensor) and value.shape == piece.param.shape
            else value
            for key, value in whole[piece.param].items()
        }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved]
    load_local_state(optimizer, values, groups)


@torch.no_grad()
def load_local_state(
    optimizer: PieceOptimizer, values: Mapping[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """See ``ShardedOptimizer.load_local_state``."""
    local = optimizer.local
    assert local is not None
    for piece in optimizer.pieces():
        held = values.get(piece.shard, {})
        master = held.pop(MASTER, None)
        if piece.shard.data_ptr() != piece.mine.data_ptr():
            piece.shard.copy_(piece.mine if master is None else master)
    shards = [shard for own in local.param_groups for shard in own["params"]]
    numbers = {shard: number for number, shard in enumerate(shards)}
    local.load_state_dict(
        {
            "state": {numbers[shard]: held for shard, held in values.items() if held},
            "param_groups": [
                {**group, "params": [numbers[shard] for shard in own["params"]]}
                for group, own in zip(groups, local.param_groups)
            ],
        }
    )
    for held, own in zip(optimizer.param_groups, local.param_groups):
        held.update((key, value) for key, value in own.items() if key not in ("params", "param_names"))


def _params(optimizer: PieceOptimizer) -> list[nn.Parameter]:
    return [param for held in optimizer.param_groups for param in held["params"]]


def _flat(value: Any, piece: Piece) -> tuple[Any, bool]:
    """Return ``value`` on the CPU, and whether it is a part of a whole value. A part is flat, in the order of
    memory."""
    if not is_piece(value, piece):
        return (value.cpu() if isinstance(value, Tensor) else value), False
    if piece.whole:
        strided = torch.empty_strided(piece.param.shape, piece.strides, dtype=value.dtype).copy_(value)
        return strided.as_strided((value.numel(),), (1,), 0), True
    return value.cpu(), True
