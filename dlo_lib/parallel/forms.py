"""The forms in which a training step is spread over ranks: one table, read by training and by the measurement of memory.

What a form promises is what ``train_step`` asks of its model: gradients, of whole parameters or of this rank's shards of them, that are
the mean over all ranks when the step's last backward has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.models.llama import Llama
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.hybrid import hybrid_groups
from dlo_lib.parallel.pipeline.build import ScheduleKind, build_pipeline
from dlo_lib.parallel.zero import ShardedOptimizer
from dlo_lib.parallel.zero2 import ShardedDDP


class Parallel(enum.Enum):
    """How the work is spread over ranks."""

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    """The third stage under its name in the ZeRO paper: what FSDP is."""
    FSDP = "fsdp"
    HSDP = "hsdp"
    PP = "pp"


class Sharded(enum.IntEnum):
    """What a rank holds only its part of: each of the stages that the ZeRO paper counts adds to the one before."""

    NOTHING = 0
    OPTIMIZER = 1
    """So every rank writes its own part of a checkpoint, which other numbers of ranks can read."""
    GRADIENTS = 2
    """So they are reduced after each micro-batch, for whole ones would not fit, and an overflow must be told to the others."""
    PARAMETERS = 3
    """So a model is built without storage, for it may fit on no rank."""


@dataclass(frozen=True)
class Spread:
    """What a form may depend on.

    group: all ranks; None in a process alone. device: where the model computes; None for where it is. values: of a model built by
    ``deferred_init``. compute_dtype: of matrix products. bucket_view, keep_buffers: see ``DDP`` and ``FSDP``. shard_size: consecutive
    ranks that hold one copy of the model, for hybrid sharding and pipelines. schedule, micro_batches, seq: of a pipeline.
    """

    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    values: Callable[[nn.Parameter], Tensor] | None = None
    compute_dtype: torch.dtype | None = None
    bucket_view: bool = True
    keep_buffers: bool | None = None
    shard_size: int = 1
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    micro_batches: int = 1
    seq: int = 1


def _plain_optimizer(model: nn.Module, params: Any, cls: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    return cls(params, **options)


def _sharded_optimizer(model: nn.Module, params: Any, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    assert isinstance(model, DDP | ShardedDDP)
    partition = model.partition if isinstance(model, ShardedDDP) else None
    return ShardedOptimizer(params, cls, group=model.group, partition=partition, **options)


@dataclass(frozen=True)
class Form:
    """One row of the table.

    wrap: spreads a model. sharded: what of it a rank holds only a part of. optimizer: makes one of a class and its options for parameters
    (or groups of them) of the model that ``wrap`` has returned.
    """

    wrap: Callable[[nn.Module, Spread], nn.Module]
    sharded: Sharded = Sharded.NOTHING
    optimizer: Callable[..., torch.optim.Optimizer] = _plain_optimizer


def _alone(model: nn.Module, spread: Spread) -> nn.Module:
    return model


def _ddp(model: nn.Module, spread: Spread) -> nn.Module:
    return DDP(model, spread.group, gradient_as_bucket_view=spread.bucket_view, keep_buckets=spread.keep_buffers)


def _zero2(model: nn.Module, spread: Spread) -> nn.Module:
    return ShardedDDP(model, spread.group, keep_buffers=spread.keep_buffers)


def _fsdp(model: nn.Module, spread: Spread) -> nn.Module:
    return FSDP(
        model,
        spread.group,
        compute_dtype=spread.compute_dtype,
        device=spread.device,
        values=spread.values,
        keep_buffers=spread.keep_buffers,
    )


def _hsdp(model: nn.Module, spread: Spread) -> nn.Module:
    groups = hybrid_groups(spread.shard_size, spread.group)
    return FSDP(
        model,
        groups.shards,
        replicas=groups.replicas,
        compute_dtype=spread.compute_dtype,
        device=spread.device,
        values=spread.values,
        keep_buffers=spread.keep_buffers,
    )


def _pp(model: nn.Module, spread: Spread) -> nn.Module:
    assert isinstance(model, Llama)
    groups = hybrid_groups(spread.shard_size, spread.group)
    schedule = spread.schedule.table(spread.shard_size, spread.micro_batches)
    return build_pipeline(model, schedule, spread.seq, groups.shards, replicas=groups.replicas, values=spread.values, device=spread.device)


FORMS: dict[Parallel, Form] = {
    Parallel.NONE: Form(_alone),
    Parallel.DDP: Form(_ddp),
    Parallel.ZERO1: Form(_ddp, Sharded.OPTIMIZER, _sharded_optimizer),
    Parallel.ZERO2: Form(_zero2, Sharded.GRADIENTS, _sharded_optimizer),
    Parallel.ZERO3: Form(_fsdp, Sharded.PARAMETERS),
    Parallel.FSDP: Form(_fsdp, Sharded.PARAMETERS),
    Parallel.HSDP: Form(_hsdp, Sharded.PARAMETERS),
    Parallel.PP: Form(_pp, Sharded.PARAMETERS),
}
