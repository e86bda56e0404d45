"""Kernels of ``dlo_lib.kernels.cross_entropy``. A program computes one row, block after block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms
from dlo_lib.kernels.triton_code.launch import as_rows, launch, row_block, warps_for

BLOCK = 8192


@triton.jit
def _losses_kernel(
    logits_ptr, targets_ptr, losses_ptr, lse_ptr, columns, ignored, smoothing, z_loss, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    offsets = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    sum_of_row = 0.0
    for block in range(0, columns, BLOCK):
        mask = block + offsets < columns
        x = tl.load(logits_ptr + row * columns + block + offsets, mask=mask, other=float("-inf"))
        x = x.to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        # The difference of two infinities is NaN: as long as only -inf was seen, subtract 0.
        finite = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(x - finite), 0)
        sum_of_row += tl.sum(tl.where(mask, x, 0.0), 0)
        largest = new
    lse = largest + tl.log(total)
    in_range = (target >= 0) & (target < columns)
    # A wrong target makes the loss NaN, because an error cannot be raised here.
    x_target = tl.load(logits_ptr + row * columns + target, mask=in_range, other=float("nan")).to(tl.float32)
    loss = lse - (1.0 - smoothing) * x_target + z_loss * lse * lse
    if smoothing > 0.0:
        loss -= smoothing * sum_of_row / columns
    tl.store(losses_ptr + row, tl.where(target == ignored, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _gradient_kernel(
    scale_ptr,
    logits_ptr,
    targets_ptr,
    lse_ptr,
    out_ptr,
    columns,
    ignored,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    scale = tl.where(target == ignored, 0.0, tl.load(scale_ptr + row))
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(logits_ptr + row * columns + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    grad = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / columns
    grad = tl.where(offsets == target, grad - (1.0 - smoothing), grad)
    tl.store(out_ptr + row * columns + offsets, grad * scale, mask=mask)


def row_losses(logits: Tensor, targets: Tensor, terms: CrossEntropyTerms) -> tuple[Tensor, Tensor]:
    """Return the loss and lse of each row, both (rows,) fp32, from (rows, vocab) and (rows,)."""
    logits = as_rows(logits)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    block = row_block(logits.shape[1], BLOCK)
    launch(
        _losses_kernel, (logits.shape[0],),
        logits, targets.contiguous(), losses, lse, logits.shape[1], terms.ignore_index, terms.label_smoothing,
        terms.z_loss, BLOCK=block, num_warps=warps_for(block),
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
    given."""
    logits = as_rows(logits)
    out = torch.empty_like(logits) if out is None else out
    block = row_block(logits.shape[1], BLOCK)
    launch(
        _gradient_kernel, (logits.shape[0], triton.cdiv(logits.shape[1], block)),
        scale.contiguous(), logits, targets.contiguous(), lse, out, logits.shape[1], terms.ignore_index,
        terms.label_smoothing, terms.z_loss, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return out
