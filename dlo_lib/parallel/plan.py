"""The distribution of a training step over ranks, as a plan of degrees and choices.

The trainer, ``measure_memory`` and the benchmarks use the same plan. ``parallelize`` applies it to a model.

    ParallelPlan(pp=2, dp_shard=4)      two stages, each sharded over four ranks: 8 ranks
    ParallelPlan(tp=2, dp_shard=4)      matrices cut over two ranks, each part sharded over four: 8 ranks
    ParallelPlan(cp=4, dp_shard=2)      four parts of each sequence; the model is sharded over all 8 ranks
    ShortForm.HSDP.plan(16, 4)          the plan of ``--parallel hsdp`` on four nodes of four ranks
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.context import ContextKind, SequenceLayout, SequencePlacement
from dlo_lib.parallel.mesh import Degrees
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.zero.flat_params import PartitionBy


class ZeroStage(enum.IntEnum):
    """The stages of the ZeRO paper: what is sharded along ``dp_shard``. Each stage includes the previous
    ones."""

    NONE = 0
    OPTIMIZER = 1
    """The optimiser state. Every rank writes a different part of a checkpoint."""
    GRADIENTS = 2
    """The gradients. They are reduced after each micro-batch, because the whole gradients may not fit."""
    PARAMETERS = 3
    """The parameters (FSDP). The model is built on the meta device, because it may not fit on one rank."""


@dataclass(frozen=True)
class ParallelPlan:
    """The degrees and choices of a training run.

    Args:
        pp, dp_replicate, dp_shard, cp, tp, ep: the number of ranks along each dimension of the mesh
            (``parallel.mesh``). One of them may be 0, which means all remaining ranks.
        sequence_parallel: whether norms and dropouts compute on parts of the sequence, along ``tp``.
        async_tp: whether these parts travel during the products of the layers; with ``sequence_parallel``.
        context_kind: the form of attention over the ranks of ``cp``.
        context_inner: the ranks that exchange heads, for ``ContextKind.COMBINED``.
        sequence_placement: the assignment of tokens to the ranks of ``cp``.
        zero_stage: what is sharded; None for the parameters if ``dp_shard`` is not 1, otherwise nothing. With
            ``ep``, stage 0 on several ranks of ``dp_shard`` cuts only the experts over them.
        zero_split: the unit of the parts of ZeRO stage 2: whole parameters for optimisers that need them.
        reshard_after_forward: the argument of ``FSDP``; None for True, or for False in a pipeline, where True
            would gather the parameters in each micro-batch.
        schedule: the schedule of a pipeline; None for 1F1B if ``pp`` is above 1, otherwise no pipeline.
        micro_batches: the number of micro-batches in a step of a pipeline.
        compute_dtype: the argument of ``FSDP``: the dtype of the gathered parameters and of the inputs of
            units.
        bucket_view: whether gradients are views of the buckets of DDP.
        keep_buffers: whether the memory of a message is reused for the next one; None: on the CPU only.

    Raises:
        UserError: the choices contradict each other, or the library does not combine them. The message names
            the cure.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    async_tp: bool = False
    context_kind: ContextKind = ContextKind.RING
    context_inner: int | None = None
    sequence_placement: SequencePlacement = SequencePlacement.ZIGZAG
    zero_stage: ZeroStage | None = None
    zero_split: PartitionBy = PartitionBy.ELEMENTS
    reshard_after_forward: bool | int | None = None
    schedule: ScheduleKind | None = None
    micro_batches: int = 1
    compute_dtype: torch.dtype | None = None
    bucket_view: bool = True
    keep_buffers: bool | None = None

    def __post_init__(self) -> None:
        if self.cp > 1:
            self.sequence_layout  # noqa: B018 (checks context_inner)
        if self.sequence_parallel and self.tp == 1:
            raise UserError("sequence parallelism is along tp, which is 1: use tp 2 or more, or leave it out")
        if self.async_tp and not self.sequence_parallel:
            raise UserError(
                "asynchronous tensor parallelism cuts the gathers of sequence parallelism: "
                "add sequence_parallel, or leave async_tp out"
            )
        if self.stage is ZeroStage.NONE and self.dp_shard != 1 and self.ep == 1:
            raise UserError(
                f"dp_shard is {self.dp_shard} and nothing is sharded: "
                "use dp_replicate, or ZeRO stage 1, 2 or 3 (fsdp)",
            )
        if self.stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
            if self.dp_replicate != 1:
                raise UserError(
                    f"ZeRO stage {self.stage.value} is over all copies of the model: "
                    "use dp_replicate 1, or stage 3 (hsdp)",
                )
            for name in ("tp", "ep"):
                if getattr(self, name) != 1:
                    raise UserError(
                        f"ZeRO stage {self.stage.value} with {name} is not in the library yet: "
                        "use stage 3 (fsdp) or 0",
                    )
            if self.pipelined:
                raise UserError(
                    f"ZeRO stage {self.stage.value} in a pipeline is not in the library yet: "
                    "use stage 3 (fsdp) or 0",
                )

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep)

    @property
    def sequence_layout(self) -> SequenceLayout:
        """The tokens of each rank of ``cp``."""
        return self.context_kind.layout(self.cp, self.sequence_placement, self.context_inner)

    @property
    def stage(self) -> ZeroStage:
        """The ZeRO stage, with None of ``zero_stage`` replaced."""
        if self.zero_stage is not None:
            return self.zero_stage
        return ZeroStage.PARAMETERS if self.dp_shard != 1 else ZeroStage.NONE

    @property
    def takes_logits(self) -> bool:
        """Whether the loss is computed outside of the model: by the last stage of a pipeline, or from the
        parts of the logits."""
        return self.pipelined or self.tp > 1

    @property
    def pipelined(self) -> bool:
        """Whether the model is a pipeline. With a schedule, this includes a pipeline of one rank."""
        return self.pp != 1 or self.schedule is not None

    @property
    def builds_in_parts(self) -> bool:
        """Whether no rank holds the whole model, so that it is built on the meta device."""
        return self._cut or self.stage is ZeroStage.PARAMETERS

    @property
    def grads_in_parts(self) -> bool:
        """Whether each rank holds only a part of the gradients, so that the ranks must agree on an
        overflow."""
        return self._cut or self.stage >= ZeroStage.GRADIENTS

    @property
    def saves_in_parts(self) -> bool:
        """Whether every rank writes a part of a checkpoint."""
        return self._cut or self.stage is not ZeroStage.NONE

    @property
    def _cut(self) -> bool:
        """Whether ranks hold parts of the model, apart from ZeRO."""
        return self.pipelined or self.tp != 1 or self.ep != 1

    def over(self, ranks: int) -> ParallelPlan:
        """Return the plan for this number of ranks, with a degree of 0 replaced.

        Raises:
            UserError: the degrees do not fit the number of ranks. The message names degrees that do.
        """
        found = self.degrees.over(ranks)
        return replace(
            self,
            pp=found.pp,
            dp_replicate=found.dp_replicate,
            dp_shard=found.dp_shard,
            cp=found.cp,
            tp=found.tp,
            # Set the stage explicitly, because with one rank, dp_shard becomes 1 and no longer implies it.
            zero_stage=self.stage,
        )


class ShortForm(enum.Enum):
    """Names of plans on the command line."""

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    """The name of FSDP in the ZeRO paper."""
    FSDP = "fsdp"
    HSDP = "hsdp"
    PP = "pp"

    def plan(
        self,
        ranks: int,
        per_node: int,
        *,
        pp: int = 0,
        dp_replicate: int = 0,
        dp_shard: int = 0,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        **choices: Any,
    ) -> ParallelPlan:
        """Return the plan of this name for a number of ranks.

        Args:
            ranks: the number of ranks.
            per_node: the number of ranks of a node. It is the default of ``pp`` for a pipeline and of
                ``dp_shard`` for HSDP.
            pp, dp_replicate, dp_shard: explicit degrees; 0 for the default.
            cp, tp, ep: the degrees of context, tensor and expert parallelism. Experts are cut over ranks of
                ``dp_shard`` and ``cp``. Without a value, ``dp_shard`` is as large as ``ep`` needs, and only
                the experts are cut.
            choices: other fields of the plan.

        Raises:
            UserError: the plan refuses the combination.
        """
        split = pp or dp_replicate or dp_shard or max(cp, tp, ep) > 1
        if self is ShortForm.NONE and not split and ranks > 1:
            raise UserError(
                f"parallel none trains on one rank, this job has {ranks}: "
                "use --parallel ddp, or start one rank",
            )
        if self in _STAGES:
            choices.setdefault("zero_stage", _STAGES[self])
        if self is ShortForm.PP:
            pp = pp or per_node
            choices["schedule"] = choices.get("schedule") or ScheduleKind.ONE_F_ONE_B
        if self is ShortForm.HSDP:
            dp_shard = dp_shard or per_node
        sharded = _STAGES.get(self, ZeroStage.NONE) is not ZeroStage.NONE
        if sharded and not dp_shard:
            return ParallelPlan(pp or 1, dp_replicate or 1, 0, cp, tp, ep, **choices).over(ranks)
        if ep > 1 and not dp_shard:
            dp_shard = ep // math.gcd(ep, cp)
            choices.setdefault("zero_stage", ZeroStage.NONE)
        return ParallelPlan(pp or 1, dp_replicate, dp_shard or 1, cp, tp, ep, **choices).over(ranks)

    @property
    def shards(self) -> bool:
        """Whether a rank holds only a part of the parameters, gradients or optimiser state."""
        return self in (ShortForm.PP, *(form for form, stage in _STAGES.items() if stage))


_STAGES = {
    ShortForm.DDP: ZeroStage.NONE,
    ShortForm.ZERO1: ZeroStage.OPTIMIZER,
    ShortForm.ZERO2: ZeroStage.GRADIENTS,
    ShortForm.ZERO3: ZeroStage.PARAMETERS,
    ShortForm.FSDP: ZeroStage.PARAMETERS,
    ShortForm.HSDP: ZeroStage.PARAMETERS,
}
