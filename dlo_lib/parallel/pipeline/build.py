"""From a Llama and a schedule to this rank's pipeline: cut, placed, tied; a model without storage is never whole anywhere."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.models.llama import Llama
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.stages import LlamaStage, tied_ends
from dlo_lib.parallel.pipeline.table import Schedule
from dlo_lib.parallel.pipeline.tied import TiedEnds

Values = Callable[[nn.Parameter], Tensor]


class ScheduleKind(enum.Enum):
    """The schedules by the names that commands take."""

    NAIVE = "naive"
    AFAB = "afab"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"

    def table(self, ranks: int, micro_batches: int) -> Schedule:
        """The schedule for so many ranks and micro-batches; interleaved with two stages a rank."""
        makers: dict[ScheduleKind, Callable[[int, int], Schedule]] = {
            ScheduleKind.NAIVE: schedules.naive,
            ScheduleKind.AFAB: schedules.afab,
            ScheduleKind.ONE_F_ONE_B: schedules.one_f_one_b,
            ScheduleKind.INTERLEAVED: lambda ranks, micro_batches: schedules.interleaved(ranks, micro_batches, 2),
            ScheduleKind.ZB_H1: schedules.zb_h1,
            ScheduleKind.ZB_H2: schedules.zb_h2,
            ScheduleKind.ZB_V: schedules.zb_v,
            ScheduleKind.DUALPIPE_V: schedules.dualpipe_v,
        }
        return makers[self](ranks, micro_batches)


def build_pipeline(
    model: Llama,
    schedule: Schedule,
    seq: int,
    group: dist.ProcessGroup | None = None,
    *,
    replicas: dist.ProcessGroup | None = None,
    values: Values | None = None,
    device: torch.device | None = None,
) -> Pipeline:
    """This rank's part of ``model`` as a pipeline over ``group``; called by all its ranks.

    Args:
        model: the whole, the same on every rank; what is not this rank's is not kept.
        seq: tokens in a sequence, by which stages are balanced.
        replicas: the ranks that hold the same stages of other pipelines; gradients are averaged over them.
        values: the value of a parameter, for a model without storage. None: the model's own.
        device: where the stages live; None for where they are.

    Raises:
        UserError: fewer pieces than stages, or what ``Pipeline`` refuses.
    """
    rank = dist.get_rank(group)
    cuts = partition(counted_costs(model.config, seq), schedule.stages)
    stages: dict[int, nn.Module] = {stage: LlamaStage(model, cuts[stage]) for stage in schedule.stages_of(rank)}
    _give_values(stages.values(), values, device)
    tied = None
    ends = tied_ends(model.config.tied_embeddings, schedule.placement)
    if ends is not None:
        tied = TiedEnds(_table_of(stages, schedule, rank, ends), ends, group)
    if replicas is not None and dist.get_world_size(replicas) > 1:
        stages = {number: DDP(stage, replicas) for number, stage in stages.items()}
    else:
        replicas = None
    return Pipeline(stages, schedule, group, tied=tied, replicas=replicas)


def _give_values(stages: Iterable[nn.Module], values: Values | None, device: torch.device | None) -> None:
    """Every parameter its own storage on this rank; one that two of its stages share stays one."""
    own: dict[int, nn.Parameter] = {}
    for stage in stages:
        for module in stage.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in own:
                    value = parameter.detach() if values is None else values(parameter)
                    own[id(parameter)] = nn.Parameter(value.to(device) if device is not None else value, parameter.requires_grad)
                setattr(module, name, own[id(parameter)])


def _table_of(stages: dict[int, nn.Module], schedule: Schedule, rank: int, ends: tuple[int, int]) -> nn.Parameter | None:
    if rank == ends[0]:
        return stages[0].get_parameter("embed_tokens.weight")
    return stages[schedule.stages - 1].get_parameter("lm_head.weight") if rank == ends[1] else None
