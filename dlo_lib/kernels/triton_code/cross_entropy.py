"""Kernels of ``dlo_lib.kernels.cross_entropy``. A program of the losses reads one row, once; a program of the
gradient computes one block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms
from dlo_lib.kernels.triton_code.launch import cdiv, launch
from dlo_lib.kernels.triton_code.rows import combine, grow, vector_of
from dlo_lib.kernels.triton_code.tuning import tuned


@triton.jit
def _losses_kernel(
    logits_ptr, targets_ptr, losses_ptr, lse_ptr, columns, ignored, smoothing, z_loss,
    SMOOTHED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    in_range = (target >= 0) & (target < columns)
    # A wrong target makes the loss NaN, because an error cannot be raised here.
    x_target = tl.load(logits_ptr + row * columns + target, mask=in_range, other=float("nan")).to(tl.float32)
    BLOCK: tl.constexpr = LANES * VECTOR
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Each lane keeps the maximum and the sum of its elements, so that the threads do not wait for each other
    # in the loop.
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES, VECTOR), tl.float32)
    at = logits_ptr + row * columns + offsets
    whole = columns // BLOCK * BLOCK
    for block in tl.range(0, whole, BLOCK, num_stages=STAGES):
        x = tl.load(at + block).to(tl.float32)
        largest, total = grow(largest, total, x)
        if SMOOTHED:
            sums += x
    if whole < columns:
        mask = whole + offsets < columns
        x = tl.load(at + whole, mask=mask, other=float("-inf")).to(tl.float32)
        largest, total = grow(largest, total, x)
        if SMOOTHED:
            sums += tl.where(mask, x, 0.0)
    maximum, total_of_row = combine(largest, total)
    lse = maximum + tl.log(total_of_row)
    loss = lse - (1.0 - smoothing) * x_target + z_loss * lse * lse
    if SMOOTHED:
        loss -= smoothing * tl.sum(tl.sum(sums, 1), 0) / columns
    tl.store(losses_ptr + row, tl.where(target == ignored, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _gradient(x, lse, is_target, scale, factor, smoothing, columns):
    grad = tl.exp(x.to(tl.float32) - lse) * factor - smoothing / columns
    return tl.where(is_target, grad - (1.0 - smoothing), grad) * scale


@triton.jit
def _gradient_kernel(
    scale_ptr, logits_ptr, targets_ptr, lse_ptr, out_ptr, columns, blocks, ignored, smoothing, z_loss,
    scale_row, BLOCK: tl.constexpr,
):  # fmt: skip
    # The blocks of a row are consecutive, because one grid dimension of a GPU is long enough for all rows.
    program = tl.program_id(0)
    row, start = (program // blocks).to(tl.int64), program % blocks * BLOCK
    target = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    scale = tl.where(target == ignored, 0.0, tl.load(scale_ptr + row * scale_row))
    factor = 1.0 + 2.0 * z_loss * lse
    offsets = start + tl.arange(0, BLOCK)
    at, out_at = logits_ptr + row * columns + offsets, out_ptr + row * columns + offsets
    is_target = offsets == target
    if start + BLOCK <= columns:
        tl.store(out_at, _gradient(tl.load(at), lse, is_target, scale, factor, smoothing, columns))
    else:
        mask = offsets < columns
        x = tl.load(at, mask=mask, other=float("-inf"))
        tl.store(out_at, _gradient(x, lse, is_target, scale, factor, smoothing, columns), mask=mask)


def row_losses(logits: Tensor, targets: Tensor, terms: CrossEntropyTerms) -> tuple[Tensor, Tensor]:
    """Return the loss and lse of each row, both (rows,) fp32, from (rows, vocab) and (rows,)."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    tiles = tuned("cross_entropy.losses", logits.device, rows=rows, columns=columns)
    launch(
        _losses_kernel, (rows,),
        logits, targets.contiguous(), losses, lse, columns, terms.ignore_index, terms.label_smoothing,
        terms.z_loss, SMOOTHED=terms.label_smoothing > 0, VECTOR=vector_of(logits), **tiles,
    )  # fmt: skip
    return losses, lse


def logits_gradient(
    scale: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    terms: CrossEntropyTerms,
    out: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits (rows, vocab), in ``out``, which may be ``logits``, if it is
    given. ``scale`` (rows,) may have any stride, such as that of an expanded number."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    out = torch.empty_like(logits) if out is None else out
    tiles = tuned("cross_entropy.gradient", logits.device, columns=columns)
    blocks = cdiv(columns, tiles["BLOCK"])
    launch(
        _gradient_kernel, (rows * blocks,),
        scale, logits, targets.contiguous(), lse, out, columns, blocks, terms.ignore_index,
        terms.label_smoothing, terms.z_loss, scale.stride(0), **tiles,
    )  # fmt: skip
    return out
