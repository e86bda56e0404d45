"""Groups for hybrid sharding (HSDP): shards within a node, where the network is fast, replicas across nodes.

    ranks 0..7, nodes of 4      shard groups {0 1 2 3} {4 5 6 7}      replica groups {0 4} {1 5} {2 6} {3 7}

Each node holds the model once, in shards; gradients are reduce-scattered within it and then averaged with those of the same shard on the
other nodes. Bytes sent per rank: those of FSDP on the node, and 2 B_g/S (R-1)/R between nodes, for S shards and R replicas.

Paper: Y. Zhao et al., PyTorch FSDP (arXiv:2304.11277), section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from dlo_lib.errors import UserError


@dataclass(frozen=True)
class HybridGroups:
    """This rank's two groups: ``FSDP(module, groups.shards, replicas=groups.replicas)``."""

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup


def hybrid_groups(shard_size: int, group: dist.ProcessGroup | None = None) -> HybridGroups:
    """Cut ``group`` (None: all ranks) into shard groups of ``shard_size`` consecutive ranks; called by all of them.

    Raises:
        UserError: ``shard_size`` does not divide the number of ranks.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    _check(shard_size, len(ranks), "shard groups")
    shards = _joined([ranks[first : first + shard_size] for first in range(0, len(ranks), shard_size)])
    replicas = _joined([ranks[first::shard_size] for first in range(shard_size)])
    return HybridGroups(shards, replicas)


def neighbours_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` consecutive ranks of ``group``; called by all of them.

    Raises:
        UserError: ``size`` does not divide the number of ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    _check(size, len(ranks), "smaller groups")
    return _joined([ranks[first : first + size] for first in range(0, len(ranks), size)])


def _check(size: int, ranks: int, what: str) -> None:
    if size < 1 or ranks % size:
        fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        raise UserError(f"{what} of {size} do not divide {ranks} ranks: use {fitting}")


def _joined(groups: list[list[int]]) -> dist.ProcessGroup:
    """The one of ``groups`` that this rank is in. Only members meet, so other ranks of the job need not take part."""
    (mine,) = (ranks for ranks in groups if dist.get_rank() in ranks)
    made = dist.new_group(mine, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
