"""The configuration of a training run: one frozen dataclass for the command line, Python and ``config.json``.

Every option is a field with its default, its help, and whether a resumed run must have the same value because
the option changes the numbers. Sizes are per data-parallel copy of the model, which is a rank or a pipeline.
One step trains on ``batch * accumulation * copies`` sequences."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import Kernels
from dlo_lib.optim import Precision
from dlo_lib.optim.averaging import Averaging
from dlo_lib.optim.batch_rules import BatchRule
from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.optim.registry import OPTIMIZERS, optimizer_entry
from dlo_lib.optim.schedules import ScheduleName
from dlo_lib.parallel.context import ContextKind
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ShortForm
from dlo_lib.profiling.settings import named, require_step, zero_split
from dlo_lib.train.config_checks import check_combinations, check_sizes
from dlo_lib.train.option import Auto, Option
from dlo_lib.train.tracking import Tracking


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Enumerated options also take their value as a string.

    Raises:
        UserError: a value is invalid.
    """

    model: Annotated[
        str, Option("name of a configuration, or checkpoint to start from: folder, or name below $DSDIR")
    ] = "tiny"
    parallel: Annotated[
        ShortForm, Option("how the work is distributed over ranks, in short", same_on_resume=False)
    ] = ShortForm.NONE
    pp: Annotated[
        int,
        Option("stages of a pipeline; 0: 1, with --parallel pp the ranks of a node", same_on_resume=False),
    ] = 0
    dp_replicate: Annotated[
        int,
        Option("copies of the model with different data; 0: the remaining ranks", same_on_resume=False),
    ] = 0
    dp_shard: Annotated[
        int,
        Option(
            "ranks that share one copy in shards; 0: as --parallel says, with hsdp those of a node",
            same_on_resume=False,
        ),
    ] = 0
    cp: Annotated[int, Option("parts of each sequence (context parallelism)", same_on_resume=False)] = 1
    context_kind: Annotated[
        ContextKind, Option("with --cp, how attention reaches the other parts", same_on_resume=False)
    ] = ContextKind.RING
    context_inner: Annotated[
        int, Option("ranks that exchange heads, for --context-kind combined", same_on_resume=False)
    ] = 0
    tp: Annotated[int, Option("parts of each matrix (tensor parallelism)", same_on_resume=False)] = 1
    sequence_parallel: Annotated[
        bool, Option("with --tp, norms compute on parts of the sequence", same_on_resume=False)
    ] = False
    async_tp: Annotated[
        bool, Option("with --sequence-parallel, these parts travel during the products", same_on_resume=False)
    ] = False
    ep: Annotated[int, Option("parts of the experts (expert parallelism)", same_on_resume=False)] = 1
    schedule: Annotated[
        ScheduleKind, Option("of a pipeline: the order of forwards and backwards", same_on_resume=False)
    ] = ScheduleKind.ONE_F_ONE_B
    data: Annotated[str, Option("name of a data set, or folder of a Hugging Face one")] = "python"
    seq: Annotated[int, Option("tokens in a sequence")] = 128
    batch: Annotated[
        int | Auto, Option("sequences in a micro-batch of one rank; auto: the most that fit on every GPU")
    ] = 8
    accumulation: Annotated[
        int, Option("micro-batches in a step of one rank, or of one pipeline", also="micro-batches")
    ] = 1
    steps: Annotated[int, Option("optimiser steps in the whole run", same_on_resume=False)] = 100
    lr: Annotated[float, Option("largest learning rate")] = 1e-3
    lr_rule: Annotated[
        BatchRule, Option("how lr follows the sequences of a step of all ranks", same_on_resume=False)
    ] = BatchRule.NONE
    lr_batch: Annotated[
        int, Option("with --lr-rule, the sequences in a step for which --lr is right", same_on_resume=False)
    ] = 0
    lr_schedule: Annotated[ScheduleName, Option("the learning-rate schedule after the warm-up")] = (
        ScheduleName.CONSTANT
    )
    lr_steps: Annotated[int, Option("steps until its end, warm-up included; 0: those of the run")] = 0
    warmup: Annotated[int, Option("steps over which the learning rate rises linearly")] = 10
    optimizer: Annotated[str, Option("name of the optimiser", choices=tuple(OPTIMIZERS))] = "adamw"
    weight_decay: Annotated[
        float, Option("weight decay, for matrices only; sgd and adam add it to the gradient")
    ] = 0.1
    clip: Annotated[float, Option("largest 2-norm of the gradient; 0 does not clip")] = 1.0
    average: Annotated[Averaging, Option("average of the weights, in the folder of each checkpoint")] = (
        Averaging.NONE
    )
    average_decay: Annotated[float, Option("of --average ema")] = 0.999
    average_start: Annotated[int, Option("first step of --average swa; 0: after 3/4 of the run")] = 0
    precision: Annotated[Precision, Option("dtype of matrix products; fp16 scales the loss")] = Precision.FP32
    fp8: Annotated[
        bool, Option("with --precision bf16, 8-bit operands in the linear layers of blocks (H100 or later)")
    ] = False
    optimizer_step: Annotated[
        OptimizerStep | Auto,
        Option(
            "implementation of the optimiser; auto: the one with the fewest kernels",
            choices=("auto", *(step.value for step in OptimizerStep)),
        ),
    ] = Auto.AUTO
    kernels: Annotated[
        Kernels,
        Option("norms, RoPE, SwiGLU, loss and AdamW as in PyTorch or fused", same_on_resume=False),
    ] = Kernels.EAGER
    compile: Annotated[
        bool, Option("compile each block, and the loss, with torch.compile", same_on_resume=False)
    ] = False
    checkpointing: Annotated[
        bool, Option("save only the input of each block and recompute the block in the backward")
    ] = False
    seed: Annotated[int, Option("of initial weights, order of the data and random states")] = 0
    out: Annotated[Path, Option("folder of the run: config, metrics, checkpoints", same_on_resume=False)] = (
        Path("runs/train")
    )
    checkpoint_every: Annotated[
        int, Option("steps between checkpoints; 0 writes one at the end only", same_on_resume=False)
    ] = 0
    checkpoint_minutes: Annotated[
        float,
        Option(
            "minutes between checkpoints, in addition to --checkpoint-every; 0: none", same_on_resume=False
        ),
    ] = 0.0
    keep: Annotated[int, Option("checkpoints to keep, the newest", same_on_resume=False)] = 2
    resume: Annotated[
        bool,
        Option("resume from the newest checkpoint of --out; without one, start anew", same_on_resume=False),
    ] = False
    log_every: Annotated[
        int, Option("steps between lines of metrics; each waits for the device", same_on_resume=False)
    ] = 10
    tracking: Annotated[Tracking, Option("where the curves of the run are stored")] = Tracking.TENSORBOARD

    def __post_init__(self) -> None:
        kinds = {
            "parallel": ShortForm,
            "context_kind": ContextKind,
            "schedule": ScheduleKind,
            "lr_schedule": ScheduleName,
            "precision": Precision,
            "kernels": Kernels,
            "tracking": Tracking,
            "lr_rule": BatchRule,
            "average": Averaging,
        }
        for name, kind in kinds.items():
            object.__setattr__(self, name, named(kind, name.replace("_", "-"), getattr(self, name)))
        object.__setattr__(self, "out", Path(self.out))
        if self.batch == Auto.AUTO.value:
            object.__setattr__(self, "batch", Auto.AUTO)
        check_sizes(self)
        self._choose_step()
        check_combinations(self)
        if self.average is Averaging.SWA:  # stored, because a longer run must average the same steps
            object.__setattr__(self, "average_start", self.average_start or self.steps * 3 // 4 + 1)
        if (
            self.lr_schedule is not ScheduleName.CONSTANT
        ):  # stored, because a longer run must not change its first steps
            object.__setattr__(self, "lr_steps", self.lr_steps or self.steps)
        self.learning_rate(1)

    def _choose_step(self) -> None:
        """Choose the implementation of the optimiser."""
        entry = optimizer_entry(self.optimizer)
        step = (
            entry.default_step if self.optimizer_step in (Auto.AUTO, Auto.AUTO.value) else self.optimizer_step
        )
        # stored, because a resumed run must have the same one
        object.__setattr__(self, "optimizer_step", named(OptimizerStep, "optimizer-step", step))
        assert isinstance(self.optimizer_step, OptimizerStep)
        require_step(self.optimizer, entry, self.optimizer_step)

    @property
    def is_parallel(self) -> bool:
        """Whether the model is distributed over ranks; one rank counts too."""
        return self.parallel is not ShortForm.NONE or bool(
            self.pp or self.dp_replicate or self.dp_shard or max(self.cp, self.tp, self.ep) > 1
        )

    @property
    def form(self) -> str:
        """The distribution of the work as a short text: the short form, the degrees, or both."""
        degrees = [
            f"{name} {size}" for name in ("pp", "dp_replicate", "dp_shard") if (size := getattr(self, name))
        ]
        degrees += [f"{name} {size}" for name in ("cp", "tp", "ep") if (size := getattr(self, name)) > 1]
        degrees += [name for name in ("sequence_parallel", "async_tp") if getattr(self, name)]
        short = [self.parallel.value] if self.parallel is not ShortForm.NONE or not degrees else []
        return " ".join(short + degrees)

    def plan(self, ranks: int, per_node: int) -> ParallelPlan:
        """Return the plan of this run on ``ranks`` ranks, ``per_node`` of them on a node.

        Raises:
            UserError: degrees that do not fit these ranks.
        """
        pipelined = self.parallel is ShortForm.PP or self.pp > 1
        return self.parallel.plan(
            ranks,
            per_node,
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            sequence_parallel=self.sequence_parallel,
            async_tp=self.async_tp,
            context_kind=self.context_kind,
            context_inner=self.context_inner or None,
            schedule=self.schedule if pipelined else None,
            micro_batches=self.accumulation,
            zero_split=zero_split(optimizer_entry(self.optimizer)),
            compute_dtype=self.precision.dtype if self.precision is not Precision.FP32 else None,
        )

    @property
    def sequences(self) -> int:
        """The sequences in a micro-batch of one rank.

        Raises:
            UserError: the run has not found them yet (``batch_search``).
        """
        if isinstance(self.batch, Auto):
            raise UserError("batch is auto: a run on a GPU replaces it by a number")
        return self.batch

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step ``step``, from 1.

        The zeros at both ends of a schedule are not used.
        """
        return self.lr * self.lr_schedule.over(self.lr_steps + 1, self.warmup)(step)

    def plain(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return {option.name: _plain(getattr(self, option.name)) for option in fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.plain(), indent=1) + "\n"

    def differences(self, before: dict[str, Any], same_sequences: bool = False) -> list[str]:
        """Return the options that differ from an earlier run and change the numbers, as ``name (before,
        now)``.

        Args:
            before: the options of that run, as ``plain`` returns them.
            same_sequences: whether a step of all ranks has as many sequences as then. Their distribution over
                ranks and micro-batches then changes only the order of sums.
        """
        now, then = self.plain(), self._before(before)
        fixed = [name for name, option in options().items() if option.same_on_resume]
        if same_sequences:
            fixed = [name for name in fixed if name not in ("batch", "accumulation")]
        return [
            f"{name.replace('_', '-')} ({then[name]}, now {now[name]})"
            for name in fixed
            if then[name] != now[name]
        ]

    def same_plan(self, before: dict[str, Any]) -> bool:
        """Return whether the options of an earlier run distribute the work in the same way."""
        now, then = self.plain(), self._before(before)
        return all(now[name] == then[name] for name in _PLAN)

    def _before(self, before: dict[str, Any]) -> dict[str, Any]:
        """Return the options of an earlier run, with defaults for options that it did not have."""
        return {**TrainConfig().plain(), **before}


_PLAN = ("parallel", "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""The options that decide which part of the work a rank has."""


def options() -> dict[str, Option]:
    """Return the metadata of each field of :class:`TrainConfig`."""
    return {
        name: hint.__metadata__[0] for name, hint in get_type_hints(TrainConfig, include_extras=True).items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
