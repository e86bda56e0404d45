"""The training step: forward, loss over the valid tokens of all ranks, backward, accumulation, clipping, optimiser.

There is one definition, used by ``train``, by ``profiling`` on fake tensors and by the labs. The loss of a micro-batch is
    sum of its token losses * world_size / (valid tokens of all micro-batches on all ranks),
so that the mean over ranks which data parallelism takes of the gradients gives the gradient of the mean loss per token, whatever
the ranks' shares. (The mean of the ranks' own means would weigh a token by how few its rank holds.)

Beside the model's own communication a step sends two numbers: the count of valid tokens, under the first forward, and the loss,
under the optimiser.
"""

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

MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets, both (batch, seq) int64."""
LossOf = Callable[[Tensor, Tensor], Tensor]
"""Logits (batch, seq, vocab) and targets (batch, seq) to a loss, ()."""


class Precision(enum.Enum):
    """The dtype of matrix products; parameters, gradients and optimiser state stay fp32 (autocast)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]


class Phase(enum.Enum):
    """The stretches of a step, in order; ``on_phase`` is called as each begins."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    END = "end"


@dataclass(frozen=True)
class StepResult:
    """What a step reports, as tensors so that an accelerator need not be waited for.

    loss: () fp32 or wider, mean over the valid tokens of all ranks. tokens: () int64, their number. grad_norm: () before clipping,
    or None when nothing is clipped. Without a single valid token the loss is 0, and so are the gradients.
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
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> StepResult:
    """One optimiser step over ``micro_batches``; gradients are None before and after it.

    Args:
        model: inputs (batch, seq) to logits (batch, seq, vocab). With ``no_sync()`` (a context without gradient communication) and
            ``finish_grad_sync()`` (waits for it) it is a data-parallel one; with ``accumulate_gradients()`` a pipeline.
        micro_batches: pairs of inputs and targets, both (batch, seq) int64 on the model's device; a target of ``IGNORE_INDEX`` is not
            learned. Their gradients are summed and communicated once (but see ``sync_each``).
        scaler: scales the loss for fp16 and skips the step when a gradient overflowed.
        max_norm: clips the gradients to this global 2-norm.
        group: the ranks over which ``model`` averages gradients; None for this process alone.
        sync_each: communicate after each micro-batch, so that a model whose gradients are sharded holds no more than its shards of them.
        on_phase: called with the phase that begins.
    """
    world_size = dist.get_world_size(group) if group is not None else 1
    valid = torch.stack([(targets != IGNORE_INDEX).sum() for _, targets in micro_batches]).sum()
    counting = dist.all_reduce(valid, group=group, async_op=True) if group is not None else None  # its wait hides behind the forward

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        losses = summed_cross_entropy(logits, targets)
        if counting is not None:
            counting.wait()
        # A count divides in the loss's own dtype; a scale computed from it would be fp32, whatever the model.
        return losses * world_size / valid.clamp(min=1)

    accumulate = getattr(model, "accumulate_gradients", None)
    if accumulate is not None:  # a pipeline has its own way through the micro-batches
        loss_sum = accumulate(micro_batches, loss_of, precision, scaler)
    else:
        loss_sum = _accumulate_gradients(model, micro_batches, loss_of, precision, scaler, sync_each, on_phase)
    getattr(model, "finish_grad_sync", lambda: None)()
    reporting = dist.all_reduce(loss_sum, group=group, async_op=True) if group is not None else None  # hides behind the optimiser

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
    optimizer.zero_grad(set_to_none=True)
    on_phase(Phase.END)

    if reporting is not None:
        reporting.wait()
    return StepResult(loss_sum / world_size, valid, grad_norm)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of valid tokens, (), in fp32 or wider; logits (batch, seq, vocab), targets (batch, seq) int64."""
    # At least fp32, and said here: autocast would do it on CPU, but leaves bf16 log-probabilities on CUDA.
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_of: LossOf,
    precision: Precision,
    scaler: torch.amp.GradScaler | None,
    sync_each: bool,
    on_phase: Callable[[Phase], None],
) -> Tensor:
    """Forward and backward of each micro-batch; the gradients are communicated with the last one's. The sum of the losses, ()."""
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for index, (inputs, targets) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with contextlib.nullcontext() if last or sync_each else getattr(model, "no_sync", contextlib.nullcontext)():
            on_phase(Phase.FORWARD)
            with torch.autocast(inputs.device.type, precision.dtype, enabled=precision is not Precision.FP32):
                logits = model(inputs)
                on_phase(Phase.LOSS)
                loss = loss_of(logits, targets)
            del logits  # the graph keeps what backward needs, and no more
            loss_sum = loss_sum + loss.detach()  # in the loss's own dtype: fp64 in the proofs of parity
            on_phase(Phase.BACKWARD)
            (loss if scaler is None else scaler.scale(loss)).backward()
            del loss
    return loss_sum


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their global 2-norm is at most ``max_norm``; return the norm before, ().

    A model whose gradients are sharded brings its own ``clip_grad_norm_(max_norm)``.
    """
    clip = getattr(model, "clip_grad_norm_", None)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm) if clip is None else clip(max_norm)
