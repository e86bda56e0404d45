"""The settings that determine the memory of a step, in addition to the model. The formula and the measurement
share them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count, unknown_name
from dlo_lib.kernels import BackwardAdamW, FusedOperation, Kernels
from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.optim import Precision
from dlo_lib.parallel.plan import ParallelPlan, ShortForm

E = TypeVar("E", bound=enum.Enum)


class OptimizerStep(enum.Enum):
    """The implementation of the optimiser step in PyTorch. The three implementations need different temporary
    memory."""

    FUSED = "fused"
    """One kernel, without temporary memory."""
    FOREACH = "foreach"
    """One kernel per operation for all parameters, the default on CUDA. A temporary tensor has the size of
    all parameters together."""
    FOR_LOOP = "for-loop"
    """A loop over the parameters. A temporary tensor has the size of one parameter."""


class UpdateInBackward(torch.optim.Optimizer):
    """``BackwardAdamW`` in the place of an optimiser: the backward updates the parameters and frees their
    gradients, so that ``step`` and ``zero_grad`` find no gradient.

    Args:
        params: the parameters.
        options: those of ``BackwardAdamW``.
    """

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        self._updates = BackwardAdamW(params, **options)
        super().__init__(self._updates.params, options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take over the state of the updates."""
        self.state.update(self._updates.state)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimiser and its memory.

    Attributes:
        cls: the class.
        options: the hyper-parameters that affect the memory.
        states: the number of state tensors with the shape of the parameter.
        denominator: whether a step computes sqrt(v) + eps, which has the size of the parameters.
        in_backward: whether the backward updates each parameter and frees its gradient. ``OptimizerStep``
            has no effect on it.
    """

    cls: Callable[..., torch.optim.Optimizer]
    options: dict[str, float]
    states: int
    denominator: bool
    in_backward: bool = False

    def arguments(self, step: OptimizerStep) -> dict[str, float]:
        """Return the keyword arguments of ``cls``."""
        if self.in_backward:
            return self.options
        return {
            "fused": step is OptimizerStep.FUSED,
            "foreach": step is OptimizerStep.FOREACH,
            **self.options,
        }


OPTIMIZERS = {
    "adamw": OptimizerKind(torch.optim.AdamW, {}, states=2, denominator=True),
    "sgd": OptimizerKind(torch.optim.SGD, {}, states=0, denominator=False),
    "sgd-momentum": OptimizerKind(torch.optim.SGD, {"momentum": 0.9}, states=1, denominator=False),
    "adamw-in-backward": OptimizerKind(UpdateInBackward, {}, states=2, denominator=False, in_backward=True),
}


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
    optimizer: OptimizerKind
    step: OptimizerStep
    plan: ParallelPlan
    alone: bool
    """Whether the step runs without a process group."""
    world_size: int
    rank: int = 0
    """The rank whose memory is measured."""
    fused: frozenset[FusedOperation] = frozenset()
    """The operations of the model that are fused."""

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
    ) -> StepSettings:
        """Parse and check the arguments of ``measure_memory``.

        Raises:
            UserError: a name is unknown, a size is below 1, or there are several ranks without a form of
                parallelism.
        """
        for name, size in (("batch", batch), ("seq", seq), ("world_size", world_size)):
            require_count(name, size)
        if not 0 <= rank < world_size:
            raise UserError(f"rank is {rank} of {world_size} ranks: use 0 to {world_size - 1}")
        for name, flag in (("checkpointing", checkpointing), ("bucket_view", bucket_view)):
            if not isinstance(flag, bool):
                raise UserError(f"{name} is {flag!r}: it should be True or False")
        if not isinstance(fused, (bool, OptimizerStep)):
            raise UserError(f"fused is {fused!r}: it should be True, False or an OptimizerStep")
        if optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", optimizer, OPTIMIZERS)
        kind = named(Precision, "precision", precision)
        plan, alone = _plan(parallel, kind, bucket_view, world_size)
        if OPTIMIZERS[optimizer].in_backward and not alone:
            raise UserError(
                f"{optimizer} updates each parameter before its gradient is averaged over ranks: "
                'use parallel="none", or optimizer="adamw"'
            )
        whole = OptimizerStep.FUSED if fused else OptimizerStep.FOREACH
        step = fused if isinstance(fused, OptimizerStep) else whole
        operations = frozenset(
            named(Kernels, "kernels", kernels).operations if isinstance(kernels, (str, Kernels)) else kernels
        )
        config = model_config(model)
        if config.moe is not None:
            raise UserError("fake tensors do not reach experts: measure a model without experts")
        chosen = cls(
            config=config,
            batch=batch,
            seq=seq,
            precision=kind,
            checkpointing=checkpointing,
            optimizer=OPTIMIZERS[optimizer],
            step=step,
            plan=plan,
            alone=alone,
            world_size=world_size,
            rank=rank,
            fused=operations,
        )
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
