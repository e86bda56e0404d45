"""Applies a plan to a model, in the order that its steps need, and creates the optimiser of the plan.

A model of any plan meets the requirement of ``train_step``: after the last backward of a step, the gradients
of the whole parameters, or of this rank's part of them, are the mean over all data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import Llama
from dlo_lib.models.moe import moe_layers
from dlo_lib.optim.entry import UpdateReach
from dlo_lib.optim.foreach_step import ForeachOptimizer
from dlo_lib.optim.registry import classes_by_reach
from dlo_lib.optim.step import MicroBatch
from dlo_lib.parallel.context import parallelize_context
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.expert import ExpertLayout, ExpertParallel, parallelize_experts
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.materialize import Values, materialize, materialize_buffers
from dlo_lib.parallel.mesh import TOKENS, ParallelMesh
from dlo_lib.parallel.owned_params import OwnerOptimizer
from dlo_lib.parallel.pipeline.llama import build_pipeline
from dlo_lib.parallel.pipeline.schedules import make_schedule
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.parallel.protocol import ParallelModel
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.apply import Styles
from dlo_lib.parallel.tensor.layout import TensorLayout
from dlo_lib.parallel.tensor.styles import llama_styles
from dlo_lib.parallel.tensor.wrapper import scale_partial_grads
from dlo_lib.parallel.whole_norms import WholeNorms
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer

_SHARDS = ("dp_shard", "cp")
"""The dimensions over which ZeRO and FSDP shard one copy of the model."""


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
    return parallelize_tensor(
        model,
        group,
        styles,
        sequence_parallel=plan.sequence_parallel,
        async_tp=plan.async_tp,
        values=values,
    )


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
            return ShardedDDP(
                module, mesh.group_along(*_SHARDS), split=plan.zero_split, keep_buffers=plan.keep_buffers
            )
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
    result is a ``ShardedOptimizer`` of this class. Where a rank holds parts of parameters and the class needs
    whole ones, it is an ``OwnerOptimizer``; if it needs only their norms, it sums them over the ranks.

    Args:
        model: the result of ``parallelize``.
        plan, mesh: those of ``parallelize``.
        params: the parameters of ``model``, or parameter groups.
        cls: the class of the optimiser.
        options: keyword arguments of ``cls``.
    """
    in_parts = plan.stage is ZeroStage.PARAMETERS or plan.tp > 1
    if mesh is not None and in_parts and cls in classes_by_reach(UpdateReach.PARAMETER, UpdateReach.MATRIX):
        assert isinstance(cls, type)
        assert isinstance(model, ParallelModel)
        over = (*(_SHARDS if plan.stage is ZeroStage.PARAMETERS else ()), "tp")
        return OwnerOptimizer(params, cls, shards=model.shards(), group=mesh.group_along(*over), **options)
    if mesh is not None and in_parts and cls in classes_by_reach(UpdateReach.NORM):
        assert isinstance(model, ParallelModel)
        made = cls(params, **options)
        assert isinstance(made, ForeachOptimizer)
        made.over_ranks = WholeNorms(model.shards())
        return made
    if mesh is None or plan.stage not in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        return cls(params, **options)
    assert isinstance(cls, type)
    partition = getattr(model, "partition", None)
    return ShardedOptimizer(params, cls, group=mesh.group_along(*_SHARDS), partition=partition, **options)
