"""The forms in which a training step is spread over ranks: one table, read by training and by the measurement of memory.

What a form promises is what ``train_step`` asks of its model: gradients, of whole parameters or of this rank's shards of them, that are
the mean over all ranks when the step's last backward has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.models.llama import Llama
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.hybrid import hybrid_groups
from dlo_lib.parallel.pipeline.build import ScheduleKind, build_pipeline


class Parallel(enum.Enum):
    """How the work is spread over ranks."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"
    PP = "pp"


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


@dataclass(frozen=True)
class Form:
    """One row of the table.

    wrap: spreads a model. sharded: a rank holds parts of parameters and optimiser state, so every rank writes its own part of a
    checkpoint, and gradients are reduced after each micro-batch, for whole ones would not fit.
    """

    wrap: Callable[[nn.Module, Spread], nn.Module]
    sharded: bool = False


def _alone(model: nn.Module, spread: Spread) -> nn.Module:
    return model


def _ddp(model: nn.Module, spread: Spread) -> nn.Module:
    return DDP(model, spread.group, gradient_as_bucket_view=spread.bucket_view, keep_buckets=spread.keep_buffers)


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
    Parallel.FSDP: Form(_fsdp, sharded=True),
    Parallel.HSDP: Form(_hsdp, sharded=True),
    Parallel.PP: Form(_pp, sharded=True),
}
