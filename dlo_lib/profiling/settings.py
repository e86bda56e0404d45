"""The choices that memory depends on besides the model, and their names: one list for the formula and for the measurement."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from dlo_lib.errors import UserError, unknown_name
from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.optim import Precision
from dlo_lib.parallel.forms import Parallel

E = TypeVar("E", bound=enum.Enum)


class OptimizerStep(enum.Enum):
    """How PyTorch runs an optimiser's step: three implementations of the same arithmetic, with their own temporaries."""

    FUSED = "fused"
    """One kernel for everything: nothing is held in between."""
    FOREACH = "foreach"
    """One kernel per operation over all parameters at once, CUDA's default: a temporary is as large as all parameters together."""
    FOR_LOOP = "for-loop"
    """Parameter by parameter: a temporary is as large as one parameter."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimiser and what it holds.

    states: tensors per parameter, of its shape. denominator: whether a step computes one, sqrt(v) + eps, as large as the parameters
    at hand.
    """

    cls: Callable[..., torch.optim.Optimizer]
    options: dict[str, float]
    states: int
    denominator: bool

    def arguments(self, step: OptimizerStep) -> dict[str, float]:
        """For ``cls``, beside the parameters."""
        return {"fused": step is OptimizerStep.FUSED, "foreach": step is OptimizerStep.FOREACH, **self.options}


OPTIMIZERS = {
    "adamw": OptimizerKind(torch.optim.AdamW, {}, states=2, denominator=True),
    "sgd": OptimizerKind(torch.optim.SGD, {}, states=0, denominator=False),
    "sgd-momentum": OptimizerKind(torch.optim.SGD, {"momentum": 0.9}, states=1, denominator=False),
}


@dataclass(frozen=True)
class StepSettings:
    """A training step of one rank; ``StepSettings.of`` reads and checks what a person wrote."""

    config: LlamaConfig
    batch: int
    seq: int
    precision: Precision
    checkpointing: bool
    optimizer: OptimizerKind
    step: OptimizerStep
    parallel: Parallel
    bucket_view: bool
    world_size: int

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
        parallel: str | Parallel,
        bucket_view: bool,
        world_size: int,
    ) -> StepSettings:
        """The settings, whole.

        Raises:
            UserError: an unknown name, a size below 1, or several ranks that nothing joins.
        """
        for name, size in (("batch", batch), ("seq", seq), ("world_size", world_size)):
            if size < 1:
                raise UserError(f"{name} is {size}: use at least 1")
        if optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", optimizer, OPTIMIZERS)
        how = named(Parallel, "parallel", parallel)
        if how is Parallel.PP:
            raise UserError("a pipeline's memory depends on its schedule: use Simulation.peak_memory of dlo_lib.parallel.pipeline.simulate")
        if how is Parallel.NONE and world_size > 1:
            raise UserError(f'world_size is {world_size} with parallel="none": use 1, or parallel="ddp" or another form')
        if isinstance(fused, bool):
            fused = OptimizerStep.FUSED if fused else OptimizerStep.FOREACH
        return cls(
            config=model_config(model),
            batch=batch,
            seq=seq,
            precision=named(Precision, "precision", precision),
            checkpointing=checkpointing,
            optimizer=OPTIMIZERS[optimizer],
            step=fused,
            parallel=how,
            bucket_view=bucket_view,
            world_size=world_size,
        )

    @property
    def writes_scores(self) -> bool:
        """Whether CUDA's attention writes the scores (seq, seq) out: it has no fp32 kernel for grouped queries that would not."""
        return self.precision is Precision.FP32 and self.config.num_heads != self.config.num_kv_heads


def named(kind: type[E], what: str, value: str | E) -> E:
    """The member of ``kind`` with that value; the nearest values are offered when there is none."""
    if isinstance(value, kind):
        return value
    names = [member.value for member in kind]
    if value not in names:
        raise unknown_name(what, str(value), names)
    return kind(value)
