"""Norms of whole parameters for optimisers that need nothing else, under FSDP and tensor parallelism.

LAMB and LARS multiply the update of a layer by a ratio of norms; the rest is elementwise. Each rank updates
its parts, with its state, and the ranks sum the squares:

    squares of the parts  |  all-reduce: a number for each norm of each parameter  |  root

Bytes that a rank sends in a step, of n parameters over N ranks: 2 x 8 n norms x 2 (N - 1) / N, for one group
of ranks. An owner of whole parameters (``parallel.owned_params``) sends 12 bytes for each *element* that it
holds. The sum is in fp64, so its result depends little on how the parameters are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.parallel.protocol import ParamShard, shard_groups


class WholeNorms:
    """Computes norms of whole tensors from the parts of the ranks, as ``ForeachOptimizer.over_ranks``.

    The ranks call it equally often, with the same parameters in the same order.

    Args:
        shards: the parameters of this rank, each cut along dimensions.
    """

    def __init__(self, shards: Iterable[ParamShard]) -> None:
        self._shards = {shard.param: shard for shard in shards}
        self._groups = shard_groups(self._shards.values())
        self._partly_empty = [shard for shard in self._shards.values() if _is_empty_somewhere(shard)]

    @torch.no_grad()
    def begin(self) -> None:
        """Give a part without elements a gradient where the parts of other ranks have one, so that all ranks
        take the step of a parameter. Communication: an all-reduce of a flag for each such parameter."""
        if not self._partly_empty:
            return
        has_grad = [float(shard.param.grad is not None) for shard in self._partly_empty]
        flags = torch.tensor(has_grad, device=self._partly_empty[0].param.device)
        for group in self._groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        for shard, flag in zip(self._partly_empty, flags.tolist(), strict=True):
            if flag and shard.param.grad is None:
                shard.param.grad = torch.zeros_like(shard.param)

    def __call__(self, params: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
        """Return the norms of whole tensors, 0-dimensional, of the dtypes of ``norms``.

        Args:
            params: of which the tensors have the shape, on this rank; one may be repeated.
            norms: of the parts of this rank, 0-dimensional.
        """
        squares = torch.stack([norm.double().square() for norm in norms])
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for number, param in enumerate(params):
            shard = self._shards[param]  # type: ignore[index]
            by_groups.setdefault(tuple(shard_groups([shard])), []).append(number)
            if not shard.counted:
                squares[number] = 0  # another rank counts the same part
        for groups, numbers in by_groups.items():
            every = len(numbers) == len(squares)
            some = squares if every else squares[numbers]
            for group in groups:
                dist.all_reduce(some, group=group)
            if not every:
                squares[numbers] = some
        return [whole.to(norm.dtype) for whole, norm in zip(squares.sqrt().unbind(), norms, strict=True)]


def _is_empty_somewhere(shard: ParamShard) -> bool:
    """Return whether a rank has no element of the parameter. The last rank of each group has the fewest."""
    last = {group: dist.get_world_size(group) - 1 for group in shard_groups([shard])}
    return not any(math.prod(box.sizes) for box in shard.boxes(last))
