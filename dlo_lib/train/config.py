"""What a training run is: one frozen dataclass, the same from the command line, from Python and in the run's ``config.json``.

Every option is written once, as a field: its default, its help and whether a resumed run must have the same value (because it changes
the numbers) are read from there. Sizes are per copy of the model that learns from data of its own, a rank or a pipeline, so that one step
learns from ``batch * accumulation * copies`` sequences.
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from dlo_lib.errors import UserError
from dlo_lib.optim import Precision
from dlo_lib.optim.schedules import Course
from dlo_lib.parallel.pipeline.build import ScheduleKind
from dlo_lib.profiling.settings import OptimizerStep, Parallel, named


@dataclass(frozen=True)
class Option:
    """What a field says about itself: its help, whether a resumed run must have the same value, and a second name on the command line."""

    help: str
    same_on_resume: bool = True
    also: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Enumerated options also take their value as a string.

    Raises:
        UserError: a value that cannot be trained with, and the cure.
    """

    model: Annotated[str, Option("name of a configuration, or checkpoint to start from: folder, or name below $DSDIR")] = "tiny"
    parallel: Annotated[Parallel, Option("how the work is spread over ranks")] = Parallel.NONE
    shard_size: Annotated[int, Option("hsdp, pp: consecutive ranks that share one copy of the model; 0: those of a node")] = 0
    schedule: Annotated[ScheduleKind, Option("pp: the order of forwards and backwards")] = ScheduleKind.ONE_F_ONE_B
    data: Annotated[str, Option("name of a data set, or folder of a Hugging Face one")] = "python"
    seq: Annotated[int, Option("tokens in a sequence")] = 128
    batch: Annotated[int, Option("sequences in a micro-batch of one rank")] = 8
    accumulation: Annotated[int, Option("micro-batches in a step of one rank, or of one pipeline", also="micro-batches")] = 1
    steps: Annotated[int, Option("optimiser steps in the whole run", same_on_resume=False)] = 100
    lr: Annotated[float, Option("largest learning rate")] = 1e-3
    lr_schedule: Annotated[Course, Option("how the learning rate goes on after the warm-up")] = Course.CONSTANT
    lr_steps: Annotated[int, Option("steps until its end, warm-up included; 0: those of the run")] = 0
    warmup: Annotated[int, Option("steps over which the learning rate rises linearly")] = 10
    weight_decay: Annotated[float, Option("AdamW's weight decay, for matrices only")] = 0.1
    clip: Annotated[float, Option("largest 2-norm of the gradient; 0 does not clip")] = 1.0
    precision: Annotated[Precision, Option("dtype of matrix products; fp16 scales the loss")] = Precision.FP32
    optimizer_step: Annotated[OptimizerStep, Option("which of PyTorch's implementations of AdamW")] = OptimizerStep.FUSED
    checkpointing: Annotated[bool, Option("keep only each block's input for backward, compute the rest again")] = False
    seed: Annotated[int, Option("of initial weights, order of the data and random states")] = 0
    out: Annotated[Path, Option("folder of the run: config, metrics, checkpoints", same_on_resume=False)] = Path("runs/train")
    checkpoint_every: Annotated[int, Option("steps between checkpoints; 0 writes one at the end only", same_on_resume=False)] = 0
    keep: Annotated[int, Option("checkpoints to keep, the newest", same_on_resume=False)] = 2
    resume: Annotated[bool, Option("go on from the newest checkpoint of --out, or start when there is none", same_on_resume=False)] = False
    log_every: Annotated[int, Option("steps between lines of metrics; each waits for the device", same_on_resume=False)] = 10

    def __post_init__(self) -> None:
        kinds = {
            "parallel": Parallel,
            "schedule": ScheduleKind,
            "lr_schedule": Course,
            "precision": Precision,
            "optimizer_step": OptimizerStep,
        }
        for name, kind in kinds.items():
            object.__setattr__(self, name, named(kind, name.replace("_", "-"), getattr(self, name)))
        object.__setattr__(self, "out", Path(self.out))
        for name in ("seq", "batch", "accumulation", "steps", "keep", "log_every"):
            self._at_least(name, 1)
        for name in ("warmup", "weight_decay", "clip", "checkpoint_every", "seed", "shard_size", "lr_steps"):
            self._at_least(name, 0)
        if not 0 < self.lr < math.inf:
            raise UserError(f"lr is {self.lr}: use a number above 0, such as 1e-3")
        if self.lr_schedule is not Course.CONSTANT:  # written down: a longer run must not change the steps behind it
            object.__setattr__(self, "lr_steps", self.lr_steps or self.steps)
        self.learning_rate(1)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not least <= value < math.inf:
            raise UserError(f"{name.replace('_', '-')} is {value}: use at least {least}")

    def learning_rate(self, step: int) -> float:
        """Of the ``step``-th step, from 1; no step is taken with the 0 at either end of a schedule."""
        return self.lr * self.lr_schedule.over(self.lr_steps + 1, self.warmup)(step)

    def plain(self) -> dict[str, Any]:
        """The options as JSON holds them."""
        return {option.name: _plain(getattr(self, option.name)) for option in fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.plain(), indent=1) + "\n"

    def differences(self, before: dict[str, Any]) -> list[str]:
        """What differs from the options of an earlier run and would change the numbers, as ``name (before, now)``."""
        now = self.plain()
        then = {**{option.name: _plain(option.default) for option in fields(self)}, **before}  # an older run knew fewer options
        fixed = [name for name, option in options().items() if option.same_on_resume]
        return [f"{name.replace('_', '-')} ({then[name]}, now {now[name]})" for name in fixed if then[name] != now[name]]


def options() -> dict[str, Option]:
    """What each field of :class:`TrainConfig` says about itself."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(TrainConfig, include_extras=True).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
