"""The distribution of a training step over ranks: a plan of degrees and choices, and the function that
applies it.

The trainer, ``measure_memory`` and the benchmarks use the same plan. A model of any plan meets the
requirement of ``train_step``: after the last backward of a step, the gradients of the whole parameters, or of
this rank's part of them, are the mean over all data.

    ParallelPlan(pp=2, dp_shard=4)      two stages, each sharded over four ranks: 8 ranks
    ParallelPlan(tp=2, dp_shard=4)      matrices cut over two ranks, each part sharded over four: 8 ranks
    ParallelPlan(cp=4, dp_shard=2)      four parts of each sequence; the model is sharded over all 8 ranks
    ShortForm.HSDP.plan(16, 4)          the plan of ``--parallel hsdp`` on four nodes of four ranks
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dlo_lib.errors import UserError
from dlo_lib.models.llama import Llama
from dlo_lib.models.moe import moe_layers
from dlo_lib.optim.step import MicroBatch
from dlo_lib.parallel.context import ContextKind, SequenceLayout, SequencePlacement, parallelize_context
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.expert import ExpertLayout, ExpertParallel, parallelize_experts
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.materialize import Values, materialize, materialize_buffers
from dlo_lib.parallel.mesh import TOKENS, Degrees, ParallelMesh
from dlo_lib.parallel.pipeline.llama import build_pipeline
from dlo_lib.parallel.pipeline.schedules import make_schedule
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.apply import Styles
from dlo_lib.parallel.tensor.layout import TensorLayout
from dlo_lib.parallel.tensor.styles import llama_styles
from dlo_lib.parallel.tensor.wrapper import scale_partial_grads
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer

_SHARDS = ("dp_shard", "cp")
"""The dimensions over which ZeRO and FSDP shard one copy of the model."""


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
        context_kind: the form of attention over the ranks of ``cp``.
        context_inner: the ranks that exchange heads, for ``ContextKind.COMBINED``.
        sequence_placement: the assignment of tokens to the ranks of ``cp``.
        zero_stage: what is sharded; None for the parameters if ``dp_shard`` is not 1, otherwise nothing. With
            ``ep``, stage 0 on several ranks of ``dp_shard`` cuts only the experts over them.
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
    context_kind: ContextKind = ContextKind.RING
    context_inner: int | None = None
    sequence_placement: SequencePlacement = SequencePlacement.ZIGZAG
    zero_stage: ZeroStage | None = None
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


def local_tokens(plan: ParallelPlan, mesh: ParallelMesh | None, micro_batch: MicroBatch) -> MicroBatch:
    """Return this rank's part of a micro-batch, which is equal on the ranks of ``cp``.

    Args:
        plan, mesh: those of ``parallelize``.
        micro_batch: inputs and targets of whole sequences, both (batch, seq) int64.

    Returns inputs and targets of the tokens of this rank, both (batch, seq / cp).

    Raises:
        UserError: the sequences cannot be divided equally. The message names lengths that can.
    """
    if mesh is None or plan.cp == 1:
        return micro_batch
    inputs, targets = micro_batch
    layout, place = plan.sequence_layout, mesh.coordinate("cp")
    return layout.shard(inputs, place), layout.shard(targets, place)


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh | None,
    *,
    device: torch.device | None = None,
    values: Values | None = None,
    seq: int = 1,
    styles: Styles | None = None,
) -> nn.Module:
    """Distribute ``model`` over the ranks of ``mesh``; called by every rank. Create the optimiser afterwards
    with ``make_optimizer``. In each step, give every rank its part of the sequences (``local_tokens``).

    Args:
        plan: the plan, with the degrees of the mesh.
        mesh: the ranks; None returns the model unchanged, for training in one process.
        device: the device of the computation; None for the current device of the model.
        values: returns the value of a parameter, for a model that was built in ``fsdp.deferred_init``; None
            for the values of the model.
        seq: the number of tokens in a sequence, for the balance of the stages of a pipeline.
        styles: how the modules are cut along ``tp``; None for the styles of a Llama.

    Returns the wrapped module, a ``ParallelModel`` unless there is nothing to distribute.

    Raises:
        UserError: the mesh has other degrees than the plan; the model of a pipeline is not a Llama,
            nor is one that is cut along ``tp`` without ``styles``; the model has no attention that can be
            distributed along ``cp``; a wrapper or a style refuses the model.
    """
    if mesh is None:
        return model
    if plan.degrees != mesh.degrees:
        raise UserError(
            f"the plan has {plan.degrees}, the mesh {mesh.degrees}: "
            "make the mesh with ParallelMesh(plan.degrees)",
        )

    # 1. Cut the matrices first, in place, because all later steps need the final parameters. A model on the
    #    meta device is cut without storage, also the layers of other ranks.
    layout = None
    if mesh.size("tp") > 1:
        layout = _cut_matrices(model, plan, mesh, values, styles)
        values = layout.values

    # 2. Cut the experts, in place.
    experts = None
    if plan.ep > 1 or (mesh.size(*TOKENS, "tp") > 1 and moe_layers(model)):
        experts = _cut_experts(model, plan, mesh, values)
        values = experts.values

    # 3. Connect the attention of the ranks of ``cp``, in place. It then computes with the heads of this rank.
    if mesh.size("cp") > 1:
        parallelize_context(
            model,
            mesh.group_along("cp"),
            kind=plan.context_kind,
            placement=plan.sequence_placement,
            inner=plan.context_inner,
        )
    if not plan.pipelined:
        if plan.stage is not ZeroStage.PARAMETERS and any(param.is_meta for param in model.parameters()):
            materialize([model], values, device)
        return _wrap(model, plan, mesh, device, values, layout, experts)

    # 4. Cut the layers. The layers of other ranks need no memory here, and must not be sharded over the ranks
    #    of this stage.
    if not isinstance(model, Llama):
        raise UserError(f"a pipeline is cut out of a Llama, not out of a {type(model).__name__}: use pp 1")
    schedule = make_schedule(plan.schedule or ScheduleKind.ONE_F_ONE_B, plan.pp, plan.micro_batches)
    sharded = plan.stage is ZeroStage.PARAMETERS
    ends_together = schedule.stages > 1 and schedule.placement[0] == schedule.placement[-1]
    if sharded and model.config.tied_embeddings and ends_together:
        raise UserError(
            "this schedule has both ends of tied embeddings on one rank, which shards them separately: "
            "use --schedule 1f1b",
        )
    if sharded and plan.reshard_after_forward is None:
        plan = replace(plan, reshard_after_forward=False)

    # 5. Wrap each stage for data parallelism. Its hooks must be the outermost, because they gather parameters
    #    before all other work and average gradients after it.
    def wrap(stage: nn.Module) -> nn.Module:
        return _wrap(stage, plan, mesh, device, values, layout, experts)

    # 6. Connect the copies of tied embeddings, which must be the parameters that the optimiser updates, and
    #    build the pipeline.
    return build_pipeline(
        model,
        schedule,
        seq,
        mesh.group_along("pp"),
        wrap=wrap,
        wrap_shards=sharded,
        values=values,
        device=device,
        sequence_parts=plan.tp if plan.sequence_parallel else 1,
    )


def _cut_matrices(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    values: Values | None,
    styles: Styles | None,
) -> TensorLayout:
    """Cut the parameters of ``model`` along ``tp``."""
    if styles is None:
        if not isinstance(model, Llama):
            raise UserError(
                f"the styles of a {type(model).__name__} are not known: give styles, or use tp 1",
            )
        styles = llama_styles(model.config)
    group = mesh.group_along("tp")
    return parallelize_tensor(model, group, styles, sequence_parallel=plan.sequence_parallel, values=values)


def _cut_experts(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    values: Values | None,
) -> ExpertLayout:
    """Cut the experts of ``model`` along ``ep``. With one rank of ``ep``, nothing is cut, and only the losses
    of the router are those of all data."""
    return parallelize_experts(
        model,
        mesh.group_along("ep"),
        replicas=mesh.group_along("dp_replicate", "dp_shard_mod_ep"),
        batch=mesh.group_along(*TOKENS),
        shards=mesh.group_along("dp_shard_mod_ep"),
        tokens=mesh.group_along(*TOKENS, "tp") if plan.sequence_parallel else None,
        values=values,
    )


def _wrap(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    device: torch.device | None,
    values: Values | None,
    layout: TensorLayout | None,
    experts: ExpertLayout | None,
) -> nn.Module:
    """Wrap ``module``, the model or one stage of it, for ranks with different data, for ``ep`` and for
    ``tp``."""
    if values is not None:
        materialize_buffers(module, values, device)
    if layout is not None:
        scale_partial_grads(module, layout)
    cut = experts if plan.ep > 1 else None
    wrapped = _data_parallel(module, plan, mesh, device, values, cut)
    if cut is not None:
        wrapped = ExpertParallel(wrapped, cut)
    return wrapped if layout is None else TensorParallel(wrapped, layout)


def _data_parallel(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    device: torch.device | None,
    values: Values | None,
    experts: ExpertLayout | None,
) -> nn.Module:
    """Wrap ``module``, the model or one stage of it, for ranks with different data."""
    match plan.stage:
        case ZeroStage.PARAMETERS:
            return FSDP(
                module,
                mesh.group_along(*_SHARDS),
                replicas=mesh.group_along("dp_replicate") if mesh.size("dp_replicate") > 1 else None,
                compute_dtype=plan.compute_dtype,
                reshard_after_forward=True
                if plan.reshard_after_forward is None
                else plan.reshard_after_forward,
                device=device,
                values=values,
                keep_buffers=plan.keep_buffers,
                sharded_over=None if experts is None else experts.sharded_over(module),
            )
        case ZeroStage.GRADIENTS:
            return ShardedDDP(module, mesh.group_along(*_SHARDS), keep_buffers=plan.keep_buffers)
    ranks = mesh.group_along(*TOKENS)
    if (plan.pipelined or plan.tp > 1) and mesh.size(*TOKENS) == 1:
        return module  # there are no other ranks for the average
    return DDP(
        module,
        ranks,
        gradient_as_bucket_view=plan.bucket_view,
        keep_buckets=plan.keep_buffers,
        reduced_over=None if experts is None else experts.reduced_over(module),
    )


def make_optimizer(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh | None,
    params: Any,
    cls: Callable[..., torch.optim.Optimizer],
    **options: Any,
) -> torch.optim.Optimizer:
    """Create ``cls(params, **options)`` for the result of ``parallelize``. For ZeRO stages 1 and 2, the
    result is a ``ShardedOptimizer`` of this class.

    Args:
        model: the result of ``parallelize``.
        plan, mesh: those of ``parallelize``.
        params: the parameters of ``model``, or parameter groups.
        cls: the class of the optimiser.
        options: keyword arguments of ``cls``.
    """
    if mesh is None or plan.stage not in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        return cls(params, **options)
    assert isinstance(cls, type)
    partition = getattr(model, "partition", None)
    return ShardedOptimizer(params, cls, group=mesh.group_along(*_SHARDS), partition=partition, **options)
