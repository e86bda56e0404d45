"""One parameter of a unit of FSDP, and what all units have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.parallel.fsdp.absent_param import AbsentParam
from dlo_lib.parallel.sharding.transport import BufferPool, Transport


@dataclass(eq=False)
class FSDPParam:
    """One parameter of a unit. ``offset`` and ``numel`` locate its part, padding included, in the row of a
    rank."""

    name: str
    owners: list[tuple[nn.Module, str]]
    offset: int
    numel: int
    shard: nn.Parameter
    whole: nn.Parameter
    parts: Tensor
    """The memory of ``whole`` with its padding, (ranks, numel). Row r is the part of rank r."""
    absent: AbsentParam
    """What the code of the model finds while the parameter is sharded."""
    arrived: bool = False
    """Whether this backward pass has computed the gradient."""
    filled: bool = False
    """Whether a gradient of this pass, or of an earlier one, is packed and not reduced yet."""

    @property
    def frozen(self) -> bool:
        """Whether the parameter was frozen after wrapping."""
        return not self.shard.requires_grad


@dataclass(frozen=True)
class FSDPLayout:
    """The process groups, devices and dtypes of the units. A dtype of None is the dtype of the parameters."""

    group: dist.ProcessGroup
    transport: Transport
    pool: BufferPool
    device: torch.device
    shard_device: torch.device
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    replicas: dist.ProcessGroup | None
    """The ranks that hold the same shards. Gradients are averaged over them as well."""
    post_forward_group: dist.ProcessGroup | None
    """The ranks that hold the whole unit together between forward and backward; None for ``group``."""
    averaged_ranks: int
    """The number of ranks over which gradients are averaged, which divides their sum."""
