"""Kernels of ``dlo_lib.kernels.linear_cross_entropy``: the losses of logits together with their gradient, and
a gradient times the gradient of the loss."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms
from dlo_lib.kernels.triton_code.cross_entropy import loss_of, scan, target_of
from dlo_lib.kernels.triton_code.launch import cdiv, launch
from dlo_lib.kernels.triton_code.rows import vector_of
from dlo_lib.kernels.triton_code.tuning import tuned

BLOCK_OF_TOTAL = 2048
"""The losses that one program adds at once."""


@triton.jit
def _gradient(x, lse, factor, uniform, is_target, of_target, ignore):
    grad = tl.exp(x.to(tl.float32) - lse) * factor - uniform
    grad = tl.where(is_target, grad - of_target, grad)
    return tl.where(ignore, 0.0, grad)  # also where the logits of an ignored row are infinite


@triton.jit
def _loss_and_gradient_kernel(
    logits_ptr, targets_ptr, losses_ptr, columns, ignored, smoothing, z_loss, SMOOTHED: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program reads its row twice. The second time it is in the L2 cache, if few programs run at once.
    row = tl.program_id(0).to(tl.int64)
    target, x_target = target_of(logits_ptr, targets_ptr, row, columns)
    BLOCK: tl.constexpr = LANES * VECTOR
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    at = logits_ptr + row * columns + offsets
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES, VECTOR), tl.float32)
    largest, total, sums = scan(
        at, offsets, columns, largest, total, sums, SMOOTHED, BLOCK, STAGES, "evict_last"
    )
    loss, lse = loss_of(largest, total, sums, x_target, columns, smoothing, z_loss, SMOOTHED)
    ignore = target == ignored
    tl.store(losses_ptr + row, tl.where(ignore, 0.0, loss))
    factor, uniform, of_target = 1.0 + 2.0 * z_loss * lse, smoothing / columns, 1.0 - smoothing
    whole = columns // BLOCK * BLOCK
    # No thread overwrites a logit that another one has not read.
    tl.debug_barrier()
    if whole < columns:
        mask = whole + offsets < columns
        x = tl.load(at + whole, mask=mask, other=float("-inf"))
        grad = _gradient(x, lse, factor, uniform, whole + offsets == target, of_target, ignore)
        tl.store(at + whole, grad, mask=mask)
    for done in tl.range(0, whole, BLOCK, num_stages=STAGES):
        block = whole - BLOCK - done  # backwards, because the end of the row was read last
        x = tl.load(at + block, eviction_policy="evict_first")
        grad = _gradient(x, lse, factor, uniform, block + offsets == target, of_target, ignore)
        tl.store(at + block, grad)


def loss_and_gradient(logits: Tensor, targets: Tensor, terms: CrossEntropyTerms, losses: Tensor) -> None:
    """Write the ``losses`` (rows,) fp32, and overwrite contiguous ``logits`` (rows, vocab) with the gradient
    of their sum."""
    rows, columns = logits.shape
    launch(
        _loss_and_gradient_kernel, (rows,),
        logits, targets.contiguous(), losses, columns, terms.ignore_index, terms.label_smoothing,
        terms.z_loss, SMOOTHED=terms.label_smoothing > 0, VECTOR=vector_of(logits),
        **tuned("loss_and_gradient", logits.device, columns=columns),
    )  # fmt: skip


@triton.jit
def _total_kernel(
    losses_ptr, targets_ptr, total_ptr, count_ptr, rows, ignored, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    losses = tl.zeros((BLOCK,), tl.float32)
    valid = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, BLOCK):
        mask = first + offsets < rows
        losses += tl.load(losses_ptr + first + offsets, mask=mask, other=0.0)
        if MEAN:
            valid += (tl.load(targets_ptr + first + offsets, mask=mask, other=ignored) != ignored).to(
                tl.int32
            )
    total = tl.sum(losses, 0)
    if MEAN:
        count = tl.maximum(tl.sum(valid, 0), 1).to(tl.float32)
        tl.store(count_ptr, count)
        total = total / count
    tl.store(total_ptr, total)


def total_loss(
    losses: Tensor, targets: Tensor, terms: CrossEntropyTerms, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of ``losses`` (rows,), (); with ``mean`` the mean over the rows that are not ignored,
    and their number, at least 1, () fp32."""
    total = losses.new_empty(())
    count = losses.new_empty(()) if mean else None
    launch(
        _total_kernel, (1,),
        losses, targets.contiguous(), total, total if count is None else count, losses.shape[0],
        terms.ignore_index, MEAN=mean, BLOCK=BLOCK_OF_TOTAL, num_warps=8,
    )  # fmt: skip
    return total, count


@triton.jit
def _scaled_kernel(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    scale = tl.load(scale_ptr).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    if first + BLOCK <= size:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(tl.float32) * scale)
    else:
        x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0)
        tl.store(out_ptr + offsets, x.to(tl.float32) * scale, mask=offsets < size)


def scaled(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Return ``x * scale`` in ``out``, computed in fp32. ``x`` and ``out`` are contiguous, of one shape, and
    may be one tensor; ``scale`` has one element."""
    tiles = tuned("scaled", x.device)
    grid = (cdiv(x.numel(), tiles["BLOCK"]),)
    launch(_scaled_kernel, grid, x, scale, out, x.numel(), **tiles)
    return out
