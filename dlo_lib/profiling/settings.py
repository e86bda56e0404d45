"""The settings that determine the memory of a step, in addition to the model. The formula and the measurement
share them."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from dlo_lib.base.errors import UserError, require_count, unknown_name
from dlo_lib.kernels import FusedOperation, Kernels
from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.optim import Precision
from dlo_lib.optim.entry import OptimizerEntry, OptimizerStep, TrainingForm, UpdateReach
from dlo_lib.optim.registry import optimizer_entry
from dlo_lib.parallel.plan import ParallelPlan, ShortForm, ZeroStage
from dlo_lib.parallel.zero.flat_params import PartitionBy

E = TypeVar("E", bound=enum.Enum)


GPUS_PER_NODE = 8
"""The number of ranks that share one copy of the model in hybrid sharding, at most."""


@dataclass(frozen=True)
class StepSettings:
    """The settings of a training step of one rank. ``StepSettings.of`` creates them from the arguments of a
    user."""

    config: LlamaConfig
    batch: int
    seq: int
    precision: Precision
    checkpointing: bool
    optimizer: OptimizerEntry
    step: OptimizerStep
    plan: ParallelPlan
    alone: bool
    """Whether the step runs without a process group."""
    world_size: int
    rank: int = 0
    """The rank whose memory is measured."""
    fused: frozenset[FusedOperation] = frozenset()
    """The operations of the model that are fused."""
    compile: bool = False
    """Whether the blocks and the loss are compiled."""
    fp8: bool = False
    """Whether the linear layers of the blocks have 8-bit products."""

    @classmethod
    def of(
        cls,
        model: str | LlamaConfig,
        batch: int,
        seq: int,
        precision: str | Precision,
        checkpointing: bool,
        optimizer: str,
        fused: bool | OptimizerStep,
        parallel: str | ShortForm | ParallelPlan,
        bucket_view: bool,
        world_size: int,
        rank: int = 0,
        kernels: str | Kernels | Collection[FusedOperation] = Kernels.EAGER,
        compile: bool = False,
        fp8: bool = False,
    ) -> StepSettings:
        """Parse and check the arguments of ``measure_memory``.

        Raises:
            UserError: a name is unknown, a size is below 1, there are several ranks without a form of
                parallelism, or training refuses the combination.
        """
        for name, size in (("batch", batch), ("seq", seq), ("world_size", world_size)):
            require_count(name, size)
        if not 0 <= rank < world_size:
            raise UserError(f"rank is {rank} of {world_size} ranks: use 0 to {world_size - 1}")
        flags = {"checkpointing": checkpointing, "bucket_view": bucket_view, "compile": compile, "fp8": fp8}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise UserError(f"{name} is {flag!r}: it should be True or False")
        if not isinstance(fused, (bool, OptimizerStep)):
            raise UserError(f"fused is {fused!r}: it should be True, False or an OptimizerStep")
        entry = optimizer_entry(optimizer)
        kind = named(Precision, "precision", precision)
        plan, alone = _plan(parallel, kind, bucket_view, world_size)
        if (why := entry.wrong_under(forms_of(None if alone else plan))) is not None:
            raise UserError(f'{optimizer} {why}: use parallel="none", or optimizer="adamw"')
        plan = replace(plan, zero_split=zero_split(entry))
        operations = frozenset(
            named(Kernels, "kernels", kernels).operations if isinstance(kernels, (str, Kernels)) else kernels
        )
        config = model_config(model)
        if config.moe is not None and config.moe.capacity_factor is not None:
            raise UserError(
                "the rows that a capacity drops are not known without data: use capacity_factor None"
            )
        chosen = cls(
            config=config,
            batch=batch,
            seq=seq,
            precision=kind,
            checkpointing=checkpointing,
            optimizer=entry,
            step=_step(optimizer, entry, fused),
            plan=plan,
            alone=alone,
            world_size=world_size,
            rank=rank,
            fused=operations,
            compile=compile,
            fp8=fp8,
        )
        _check_products(chosen)
        if plan.cp > 1 and chosen.writes_scores:
            raise UserError(
                "the scores that fp32 attention with grouped queries writes are not measured with cp: "
                "use precision bf16, or a plan with cp 1"
            )
        return chosen

    @property
    def tokens(self) -> int:
        """The tokens of a sequence that this rank has.

        Raises:
            UserError: the sequence cannot be divided over the ranks of ``cp``.
        """
        return self.plan.sequence_layout.local(self.seq) if self.plan.cp > 1 else self.seq

    @property
    def writes_scores(self) -> bool:
        """Whether attention writes the scores (seq, seq) to memory. CUDA has no flash kernel for grouped
        queries in fp32."""
        grouped = self.config.num_heads != self.config.num_kv_heads
        return self.precision is Precision.FP32 and grouped and FusedOperation.ATTENTION not in self.fused


def _check_products(chosen: StepSettings) -> None:
    """Refuse what ``train`` refuses for ``--compile`` and ``--fp8``."""
    if chosen.fp8 and chosen.precision is not Precision.BF16:
        raise UserError('fp8 leaves the other operations in bf16: use precision="bf16", or fp8=False')
    for name, used in (("fp8", chosen.fp8), ("compile", chosen.compile)):
        if used and chosen.plan.tp > 1:
            raise UserError(f"{name} cannot be used with tp: use {name}=False, or a plan with tp 1")


def forms_of(plan: ParallelPlan | None) -> set[TrainingForm]:
    """Return the forms of distribution of ``plan``, None being one process without ranks."""
    if plan is None:
        return {TrainingForm.ALONE}
    stages = {
        ZeroStage.NONE: TrainingForm.DDP,
        ZeroStage.OPTIMIZER: TrainingForm.ZERO1,
        ZeroStage.GRADIENTS: TrainingForm.ZERO2,
        ZeroStage.PARAMETERS: TrainingForm.FSDP,
    }
    cut = {TrainingForm.TP: plan.tp > 1, TrainingForm.PP: plan.pipelined, TrainingForm.EP: plan.ep > 1}
    return {stages[plan.stage], *(form for form, used in cut.items() if used)}


def zero_split(entry: OptimizerEntry) -> PartitionBy:
    """Return the unit of the parts of ZeRO that the optimiser can update."""
    elements = entry.reach is UpdateReach.ELEMENT
    return PartitionBy.ELEMENTS if elements else PartitionBy.PARAMETERS


def _step(name: str, entry: OptimizerEntry, fused: bool | OptimizerStep) -> OptimizerStep:
    """Return the implementation that ``fused`` chooses. True is the one with the fewest kernels, and False is
    ``foreach`` where the optimiser has it.

    Raises:
        UserError: the optimiser does not have it.
    """
    if fused is True or entry.in_backward:
        return entry.default_step
    step = fused if isinstance(fused, OptimizerStep) else OptimizerStep.FOREACH
    require_step(name, entry, step)
    return step


def require_step(name: str, entry: OptimizerEntry, step: OptimizerStep) -> None:
    """Check that the optimiser ``name`` has this implementation.

    Raises:
        UserError: it does not.
    """
    if step not in entry.steps:
        known = " or ".join(known.value for known in entry.steps)
        raise UserError(f"{name} has no {step.value} step: use {known}")


def _plan(
    parallel: str | ShortForm | ParallelPlan,
    precision: Precision,
    bucket_view: bool,
    ranks: int,
) -> tuple[ParallelPlan, bool]:
    """Return the plan, and whether it needs no process group."""
    if isinstance(parallel, ParallelPlan):
        plan, alone = parallel.over(ranks), False
    else:
        how = named(ShortForm, "parallel", parallel)
        if how is ShortForm.NONE and ranks > 1:
            raise UserError(
                f'world_size is {ranks} with parallel="none": use 1, or parallel="ddp" or another form'
            )
        plan, alone = how.plan(ranks, min(GPUS_PER_NODE, ranks)), how is ShortForm.NONE
    # Do not keep buffers, as on a GPU.
    compute_dtype = plan.compute_dtype or precision.dtype
    plan = replace(plan, compute_dtype=compute_dtype, bucket_view=bucket_view, keep_buffers=False)
    return plan, alone


def named(kind: type[E], what: str, value: str | E) -> E:
    """Return the member of ``kind`` with this value.

    Raises:
        UserError: there is none. The message offers similar values.
    """
    if isinstance(value, kind):
        return value
    names = [member.value for member in kind]
    if value not in names:
        raise unknown_name(what, str(value), names)
    return kind(value)
