"""Loss scaling for fp16 when each rank holds a part of the gradients. After an overflow on one rank, all
ranks skip the step.

A rank detects an overflow only in its own shards. If it skipped the step alone, the shards would belong to
different steps. Therefore the overflow flag of ``GradScaler`` is the maximum over the ranks: one all-reduce
of a scalar in each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.parallel.protocol import local_optimizer
from dlo_lib.parallel.sharding.sharded_grad import RemoteGrad


class ShardedGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose overflow flag is equal on all ranks of ``group``.

    Args:
        device: the type of the device, as in ``GradScaler``.
        group: the ranks that hold parts of the gradients: the shards of FSDP, the pieces of a
            ``ShardedOptimizer`` after ``ShardedDDP``, or the stages of a pipeline. Ranks that hold equal
            gradients, as after DDP, are right as well.
        options: keyword arguments of ``GradScaler``.
    """

    def __init__(self, device: str, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(device, **options)
        self._group = group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        holder = optimizer if _has_whole_gradients(optimizer) else local_optimizer(optimizer)
        with torch._C.DisableTorchFunctionSubclass():  # the flag is reduced below, once
            super().unscale_(holder)
        state = self._per_optimizer_states[id(optimizer)] = self._per_optimizer_states[id(holder)]
        assert self._scale is not None
        found = torch.zeros((), device=self._scale.device)  # a rank without gradients takes part as well
        for flag in state["found_inf_per_device"].values():
            found += flag.to(found.device, non_blocking=True)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        state["found_inf_per_device"] = {found.device: found}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self._enabled and not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def _has_whole_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the parameters of ``optimizer`` hold gradients themselves. After DDP, those of a
    ``ShardedOptimizer`` do, and its pieces get theirs in ``step``."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return any(param.grad is not None and not isinstance(param.grad, RemoteGrad) for param in params)
