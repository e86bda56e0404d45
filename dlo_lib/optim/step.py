"""The training step: forward, loss over the valid tokens of all ranks, backward, accumulation, clipping,
optimiser.

``train``, ``profiling`` (on fake tensors) and the labs share this definition. The loss of a micro-batch is
    sum of its token losses * world_size / (valid tokens of all micro-batches on all ranks).
Data parallelism averages the gradients over the ranks. With this loss, the average is the gradient of the
mean loss per token, however the tokens are distributed. (The mean of the means of the ranks would give a
larger weight to the tokens of a rank that has few of them.)

A mixture-of-experts layer adds the gradients of its losses itself (``models.moe``). The step sets their
scale, so that the loss of a layer is the mean over the micro-batches, and updates the balance bias after the
optimiser. The reported loss does not include them.

In addition to the communication of the model, a step sends two numbers: the count of valid tokens, which
overlaps with the first forward, and the loss, which overlaps with the optimiser."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.models.moe import moe_layers, scale_auxiliary_losses, update_balance_bias

MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets, both (batch, seq) int64."""
LossOf = Callable[[Tensor, Tensor], Tensor]
"""Maps logits (batch, seq, vocab) and targets (batch, seq) to a loss, ()."""


class Precision(enum.Enum):
    """The dtype of matrix products; parameters, gradients and optimiser state stay fp32 (autocast)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]


class Phase(enum.Enum):
    """The phases of a step, in order; ``on_phase`` is called at the start of each."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    END = "end"


@dataclass(frozen=True)
class StepResult:
    """The results of a step, as tensors, so that the CPU does not wait for the accelerator.

    Without a valid token, the loss and the gradients are 0.

    Attributes:
        loss: () fp32 or wider, the mean over the valid tokens of all ranks.
        tokens: () int64, the number of valid tokens of all ranks.
        grad_norm: () the norm before clipping; None without clipping.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor | None


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    precision: Precision = Precision.FP32,
    scaler: torch.amp.GradScaler | None = None,
    max_norm: float | None = None,
    group: dist.ProcessGroup | None = None,
    sync_each: bool = False,
    sum_of_losses: LossOf | None = None,
    loss_in_model: bool = False,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> StepResult:
    """Take one optimiser step over ``micro_batches``; gradients are None before and after it.

    Args:
        model: maps inputs (batch, seq) to logits (batch, seq, vocab). A data-parallel model has ``no_sync()``
            (a context without gradient communication) and ``finish_grad_sync()`` (waits for the
            communication); a pipeline has ``accumulate_gradients()``. A tensor-parallel model has
            ``summed_cross_entropy(logits, targets)``, the loss of logits that are cut over the ranks.
        micro_batches: pairs of inputs and targets, both (batch, seq) int64 on the device of the model.
            Targets equal to ``IGNORE_INDEX`` are ignored. The gradients are summed and communicated once (but
            see ``sync_each``).
        scaler: scales the loss for fp16 and skips the step when a gradient overflowed.
        max_norm: clips the gradients to this global 2-norm.
        group: the ranks over which ``model`` averages gradients; None for this process alone.
        sync_each: communicate after each micro-batch, so that a model with sharded gradients stores only its
            shards.
        sum_of_losses: returns the sum of the losses of the valid tokens, (); None for
            ``summed_cross_entropy``. A method ``model.summed_cross_entropy`` precedes it.
        loss_in_model: whether ``model(inputs, targets)`` returns this sum, without logits. A pipeline and a
            tensor-parallel model cannot.
        on_phase: called with each phase at its start.
    """
    world_size = dist.get_world_size(group) if group is not None else 1
    valid = torch.stack([(targets != IGNORE_INDEX).sum() for _, targets in micro_batches]).sum()
    # The all-reduce of the count overlaps with the forward.
    counting = dist.all_reduce(valid, group=group, async_op=True) if group is not None else None

    # A model whose logits are cut over the ranks has a loss for them.
    sum_of = getattr(model, "summed_cross_entropy", sum_of_losses or summed_cross_entropy)

    def loss_of(output: Tensor, targets: Tensor) -> Tensor:
        losses = output if loss_in_model else sum_of(output, targets)
        if counting is not None:
            counting.wait()
        # Division by the integer count keeps the dtype of the loss; a scale would be fp32.
        return losses * world_size / valid.clamp(min=1)

    mixtures = moe_layers(model)
    if mixtures:
        mean = torch.full((), 1 / len(micro_batches), device=micro_batches[0][0].device)
        scale_auxiliary_losses(mixtures, mean if scaler is None else scaler.scale(mean))
    accumulate = getattr(model, "accumulate_gradients", None)
    if accumulate is not None:  # a pipeline schedules the micro-batches itself
        loss_sum = accumulate(micro_batches, loss_of, precision, scaler)
    else:
        loss_sum = _accumulate_gradients(
            model, micro_batches, loss_of, precision, scaler, sync_each, loss_in_model, on_phase
        )
    if counting is not None:
        counting.wait()  # again, because only the last stage of a pipeline has computed a loss
    getattr(model, "finish_grad_sync", lambda: None)()
    # The all-reduce of the loss overlaps with the optimiser.
    reporting = dist.all_reduce(loss_sum, group=group, async_op=True) if group is not None else None

    grad_norm = None
    if max_norm is not None:
        on_phase(Phase.CLIP)
        if scaler is not None:
            scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm(model, max_norm)
    on_phase(Phase.OPTIMIZER)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    update_balance_bias(mixtures)
    optimizer.zero_grad(set_to_none=True)
    on_phase(Phase.END)

    if reporting is not None:
        reporting.wait()
    return StepResult(loss_sum / world_size, valid, grad_norm)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the sum of the losses of the valid tokens, (), in fp32 or wider.

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) int64.
    """
    # The cast is explicit, because autocast computes in fp32 on CPU but in bf16 on CUDA.
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_of: LossOf,
    precision: Precision,
    scaler: torch.amp.GradScaler | None,
    sync_each: bool,
    loss_in_model: bool,
    on_phase: Callable[[Phase], None],
) -> Tensor:
    """Run forward and backward of each micro-batch and return the sum of the losses, ().

    The gradients are communicated in the backward of the last micro-batch, or of each one with ``sync_each``.
    """
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for index, (inputs, targets) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with (
            contextlib.nullcontext()
            if last or sync_each
            else getattr(model, "no_sync", contextlib.nullcontext)()
        ):
            on_phase(Phase.FORWARD)
            with torch.autocast(inputs.device.type, precision.dtype, enabled=precision is not Precision.FP32):
                output = model(inputs, targets) if loss_in_model else model(inputs)
                on_phase(Phase.LOSS)
                loss = loss_of(output, targets)
            del output  # the graph keeps the tensors that backward needs
            loss_sum = loss_sum + loss.detach()  # keeps the dtype of the loss (fp64 in the parity tests)
            on_phase(Phase.BACKWARD)
            (loss if scaler is None else scaler.scale(loss)).backward()
            del loss
    return loss_sum


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their global 2-norm is at most ``max_norm``; return the norm before
    scaling, ().

    A model with sharded gradients has a method ``clip_grad_norm_(max_norm)``, which is called instead.
    """
    clip = getattr(model, "clip_grad_norm_", None)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm) if clip is None else clip(max_norm)
