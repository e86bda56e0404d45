"""Which values of a training run are refused, and with what cure. ``config`` is a ``TrainConfig``, which
imports this module."""

from __future__ import annotations

import math
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.optim import Precision
from dlo_lib.optim.batch_rules import BatchRule
from dlo_lib.optim.registry import optimizer_entry
from dlo_lib.parallel.context import SequencePlacement
from dlo_lib.train.option import Auto


def check_sizes(config: Any) -> None:
    """Refuse numbers that are too small.

    Raises:
        UserError: one is.
    """
    for name in ("seq", "batch", "accumulation", "steps", "keep", "log_every"):
        if getattr(config, name) is not Auto.AUTO:
            _at_least(config, name, 1)
    for name in (
        "warmup",
        "weight_decay",
        "clip",
        "checkpoint_every",
        "checkpoint_minutes",
        "seed",
        "pp",
        "dp_replicate",
        "dp_shard",
        "context_inner",
        "lr_steps",
        "lr_batch",
        "average_start",
    ):
        _at_least(config, name, 0)
    for name in ("cp", "tp", "ep"):
        _at_least(config, name, 1)
    if not 0 < config.lr < math.inf:
        raise UserError(f"lr is {config.lr}: use a number above 0, such as 1e-3")


def check_combinations(config: Any) -> None:
    """Refuse values that do not belong together.

    Raises:
        UserError: two do not.
    """
    _check_optimizer(config)
    if config.sequence_parallel and config.tp == 1:
        raise UserError("sequence-parallel needs tp 2 or more: use --tp 2, or leave it out")
    if config.async_tp and not config.sequence_parallel:
        raise UserError("async-tp needs sequence-parallel: add --sequence-parallel, or leave it out")
    if config.fp8 and config.precision is not Precision.BF16:
        raise UserError("fp8 leaves the other operations in bf16: add --precision bf16, or leave --fp8 out")
    if config.fp8 and config.tp > 1:
        raise UserError("fp8 with tp is not in the library yet: leave --fp8 out, or use --tp 1")
    if config.fp8 and isinstance(config.batch, int) and config.batch * config.seq // config.cp % 16:
        raise UserError(
            f"fp8 needs a multiple of 16 tokens on a rank, batch x seq is {config.batch} x {config.seq}: "
            "use another --seq"
        )
    if config.compile and config.tp > 1:
        raise UserError(
            "compile cannot trace the communication inside the linear layers of tp: leave --compile out, "
            "or use --tp 1"
        )
    _check_seq(config)
    if (config.lr_rule is BatchRule.NONE) == (config.lr_batch > 0):
        raise UserError("lr-rule and lr-batch belong together: --lr-rule sqrt --lr-batch 32, or neither")
    if config.lr_batch and config.batch is Auto.AUTO:
        raise UserError("lr-rule needs a number of sequences: give --batch a number, or leave it out")
    if not 0 <= config.average_decay < 1:
        raise UserError(f"average-decay is {config.average_decay}: use a number below 1, such as 0.999")


def _check_optimizer(config: Any) -> None:
    entry = optimizer_entry(config.optimizer)
    if not entry.in_backward:
        return
    for cure, wrong in {
        "--clip 0": config.clip,
        "--accumulation 1": config.accumulation > 1,
        "--precision bf16 or fp32": config.precision is Precision.FP16,
    }.items():
        if wrong:
            raise UserError(
                f"{config.optimizer} frees each gradient in the backward of a micro-batch: add {cure}, or "
                "use --optimizer adamw"
            )


def _at_least(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if not least <= value < math.inf:
        raise UserError(f"{name.replace('_', '-')} is {value}: use at least {least}")


def _check_seq(config: Any) -> None:
    """Refuse a length of sequences that the ranks of ``cp``, and of ``tp`` with sequence parallelism,
    cannot divide."""
    layout = config.context_kind.layout(config.cp, SequencePlacement.ZIGZAG, config.context_inner or None)
    parts = {f"cp {config.cp}": layout.multiple} if config.cp > 1 else {}
    if config.sequence_parallel:
        parts[f"tp {config.tp} with sequence-parallel"] = config.cp * config.tp
    multiple = math.lcm(*parts.values())
    if config.seq % multiple:
        raise UserError(
            f"seq {config.seq} cannot be divided over {' and '.join(parts)}: "
            f"use --seq {-(-config.seq // multiple) * multiple}"
        )
