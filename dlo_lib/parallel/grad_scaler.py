"""Loss scaling for fp16 where each rank holds its own part of the gradients: an overflow on one rank is one for all.

A rank sees only its shards overflow; if it alone skipped the step, the shards would no longer be of one model. So the flag that
``GradScaler`` keeps, on the device, is the largest of all ranks: one all-reduce of a number a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.parallel.zero import ShardedOptimizer


class ShardedGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that agrees over ``group``, the ranks that hold parts of the gradients: those of FSDP's shards, or those
    that ``ShardedDDP`` has left in the pieces of a ``ShardedOptimizer``.
    """

    def __init__(self, device: str, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(device, **options)
        self._group = group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        holder = optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer
        assert holder is not None
        super().unscale_(holder)
        state = self._per_optimizer_states[id(optimizer)] = self._per_optimizer_states[id(holder)]
        assert self._scale is not None
        found = torch.zeros((), device=self._scale.device)  # of a rank that holds no gradient as well
        for flag in state["found_inf_per_device"].values():
            found += flag.to(found.device, non_blocking=True)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        state["found_inf_per_device"] = {found.device: found}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self._enabled and not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
