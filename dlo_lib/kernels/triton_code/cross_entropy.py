"""Kernels of ``dlo_lib.kernels.cross_entropy``. A program of the losses reads one row, once; a program of the
gradient computes BLOCK consecutive elements, of one row or of two.

Both access 16 bytes at a time in rows of any length, such as 50,257, which begin at any element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms
from dlo_lib.kernels.triton_code.launch import cdiv
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.rows import combine, grow
from dlo_lib.kernels.triton_code.tuning import planned, tuned


@triton.jit
def target_of(logits_ptr, targets_ptr, row, columns):
    """Return the target of a row, and its logit. A wrong target makes the loss NaN, because an error cannot
    be raised here."""
    target = tl.load(targets_ptr + row)
    in_range = (target >= 0) & (target < columns)
    logit = tl.load(logits_ptr + row * columns + target, mask=in_range, other=float("nan"))
    return target, logit.to(tl.float32)


@triton.jit
def scan(
    at, offsets, length, largest, total, sums, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Add ``length`` logits to the maximum and the sum of exponentials of each lane (LANES,), and to the sums
    of the logits (LANES, VECTOR). The first tile is at ``at``, and the cache treats it by POLICY. Each lane
    has its own maximum, so that the threads do not wait for each other in the loop."""
    whole = length // BLOCK * BLOCK
    for block in tl.range(0, whole, BLOCK, num_stages=STAGES):
        x = tl.load(at + block, eviction_policy=POLICY).to(tl.float32)
        largest, total = grow(largest, total, x)
        if SMOOTHED:
            sums += x
    if whole < length:
        mask = whole + offsets < length
        x = tl.load(at + whole, mask=mask, other=float("-inf")).to(tl.float32)
        largest, total = grow(largest, total, x)
        if SMOOTHED:
            sums += tl.where(mask, x, 0.0)
    return largest, total, sums


@triton.jit
def loss_of(largest, total, sums, x_target, columns, smoothing, z_loss, SMOOTHED: tl.constexpr):
    """Return the loss and the lse of a row from what ``scan`` returns."""
    maximum, total_of_row = combine(largest, total)
    lse = maximum + tl.log(total_of_row)
    loss = lse - (1.0 - smoothing) * x_target + z_loss * lse * lse
    if SMOOTHED:
        loss -= smoothing * tl.sum(tl.sum(sums, 1), 0) / columns
    return loss, lse


@triton.jit
def _losses_kernel(
    logits_ptr, targets_ptr, losses_ptr, lse_ptr, columns, ignored, smoothing, z_loss,
    SMOOTHED: tl.constexpr, ODD: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target, x_target = target_of(logits_ptr, targets_ptr, row, columns)
    BLOCK: tl.constexpr = LANES * VECTOR
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES, VECTOR), tl.float32)
    start, length = row * columns, columns
    if ODD:  # the first block begins with the last 16 bytes before the row, so that all are aligned
        aligned = start // VECTOR * VECTOR
        mask = aligned + offsets >= start
        x = tl.where(mask, tl.load(logits_ptr + aligned + offsets).to(tl.float32), float("-inf"))
        largest, total = grow(largest, total, x)
        if SMOOTHED:
            sums += tl.where(mask, x, 0.0)
        length = (start + columns - aligned).to(tl.int32) - BLOCK
        start = aligned + BLOCK
    at = logits_ptr + start + offsets
    largest, total, sums = scan(at, offsets, length, largest, total, sums, SMOOTHED, BLOCK, STAGES, "")
    loss, lse = loss_of(largest, total, sums, x_target, columns, smoothing, z_loss, SMOOTHED)
    tl.store(losses_ptr + row, tl.where(target == ignored, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _gradient(x, lse, is_target, scale, factor, smoothing, columns):
    grad = tl.exp(x.to(tl.float32) - lse) * factor - smoothing / columns
    return tl.where(is_target, grad - (1.0 - smoothing), grad) * scale


@triton.jit
def _of_row(scale_ptr, targets_ptr, lse_ptr, row, ignored, scale_row):
    target = tl.load(targets_ptr + row)
    scale = tl.load(scale_ptr + row * scale_row)
    return target, tl.load(lse_ptr + row), tl.where(target == ignored, 0.0, scale)


@triton.jit
def _gradient_kernel(
    scale_ptr, logits_ptr, targets_ptr, lse_ptr, out_ptr, rows, columns, ignored, smoothing, z_loss,
    scale_row, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row = start // columns
    left = (row + 1) * columns - start  # elements of the first row
    offsets = tl.arange(0, BLOCK)
    at, out_at = logits_ptr + start + offsets, out_ptr + start + offsets
    target, lse, scale = _of_row(scale_ptr, targets_ptr, lse_ptr, row, ignored, scale_row)
    factor = 1.0 + 2.0 * z_loss * lse
    is_target = offsets == target + left - columns
    if left >= BLOCK:
        tl.store(out_at, _gradient(tl.load(at), lse, is_target, scale, factor, smoothing, columns))
    elif start + BLOCK <= rows * tl.cast(columns, tl.int64):  # the block ends in the next row
        x = tl.load(at)
        target_2, lse_2, scale_2 = _of_row(scale_ptr, targets_ptr, lse_ptr, row + 1, ignored, scale_row)
        first = offsets < left
        factor_2 = tl.where(first, factor, 1.0 + 2.0 * z_loss * lse_2)
        is_target = tl.where(first, is_target, offsets == target_2 + left)
        lse_2, scale_2 = tl.where(first, lse, lse_2), tl.where(first, scale, scale_2)
        tl.store(out_at, _gradient(x, lse_2, is_target, scale_2, factor_2, smoothing, columns))
    else:  # the last row
        mask = offsets < left
        x = tl.load(at, mask=mask, other=float("-inf"))
        tl.store(out_at, _gradient(x, lse, is_target, scale, factor, smoothing, columns), mask=mask)


def row_losses(logits: Tensor, targets: Tensor, terms: CrossEntropyTerms) -> tuple[Tensor, Tensor]:
    """Return the loss and lse of each row, both (rows,) fp32, from (rows, vocab) and (rows,)."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    targets = targets.contiguous()
    start = _prepare_losses(logits.device, logits.dtype, targets.dtype, rows, columns, terms)
    start(logits, targets, losses, lse)
    return losses, lse


@planned
def _prepare_losses(
    device: torch.device, dtype: torch.dtype, of_targets: torch.dtype, rows: int, columns: int,
    terms: CrossEntropyTerms,
) -> PreparedLaunch:  # fmt: skip
    tiles, vector = tuned("cross_entropy.losses", device, rows=rows, columns=columns), 16 // dtype.itemsize
    odd = columns % vector > 0 and columns >= 2 * vector * tiles["LANES"]
    numbers = (columns, terms.ignore_index, terms.label_smoothing, terms.z_loss)
    meta = {"SMOOTHED": terms.label_smoothing > 0, "VECTOR": vector, "ODD": odd, **tiles}
    return PreparedLaunch(_losses_kernel, rows, numbers, meta)


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
    targets = targets.contiguous()
    start = _prepare_gradient(
        logits.device, logits.dtype, targets.dtype, rows, columns, terms, scale.dtype, scale.stride(0)
    )
    start(scale, logits, targets, lse, out)
    return out


@planned
def _prepare_gradient(
    device: torch.device, dtype: torch.dtype, of_targets: torch.dtype, rows: int, columns: int,
    terms: CrossEntropyTerms, of_scale: torch.dtype, scale_row: int,
) -> PreparedLaunch:  # fmt: skip
    tiles = tuned("cross_entropy.gradient", device, columns=columns)
    # At most one row ends in a block, so that a block is never longer than a row.
    tiles["BLOCK"] = min(tiles["BLOCK"], 1 << max(columns.bit_length() - 1, 0))
    numbers = (rows, columns, terms.ignore_index, terms.label_smoothing, terms.z_loss, scale_row)
    return PreparedLaunch(_gradient_kernel, cdiv(rows * columns, tiles["BLOCK"]), numbers, tiles)
