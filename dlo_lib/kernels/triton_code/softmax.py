"""Kernels of ``dlo_lib.kernels.softmax``. A program computes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import as_rows, launch, row_block, warps_for


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + start + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + start + offsets, weights / tl.sum(weights, 0), mask=mask)


@triton.jit
def _long_softmax_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    # Each lane keeps the maximum and the sum of its elements; the lanes are combined after the loop.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, columns, BLOCK):
        x = tl.load(x_ptr + start + block + offsets, mask=block + offsets < columns, other=float("-inf"))
        x = x.to(tl.float32)
        new = tl.maximum(largest, x)
        # The difference of two infinities is NaN: a lane that has seen only -inf keeps the sum 0.
        total = tl.where(new == float("-inf"), 0.0, total * tl.exp(largest - new) + tl.exp(x - new))
        largest = new
    maximum = tl.max(largest, 0)
    total_of_row = tl.sum(total * tl.exp(largest - maximum), 0)
    for block in range(0, columns, BLOCK):
        mask = block + offsets < columns
        x = tl.load(x_ptr + start + block + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + start + block + offsets, tl.exp(x - maximum) / total_of_row, mask=mask)


@triton.jit
def _softmax_backward_kernel(grad_ptr, y_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, columns, BLOCK):
        mask = block + offsets < columns
        grad = tl.load(grad_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        products += grad * y
    mean = tl.sum(products, 0)
    for block in range(0, columns, BLOCK):
        mask = block + offsets < columns
        grad = tl.load(grad_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + start + block + offsets, y * (grad - mean), mask=mask)


def softmax_forward(x: Tensor) -> Tensor:
    """Return the softmax of x (..., n) over the last dimension, contiguous."""
    rows = as_rows(x)
    y = torch.empty_like(rows)
    columns = rows.shape[1]
    block = row_block(columns)
    kernel = _softmax_kernel if block >= columns else _long_softmax_kernel
    grid = (rows.shape[0] if columns else 0,)
    launch(kernel, grid, rows, y, columns, BLOCK=block, num_warps=warps_for(block))
    return y.view(x.shape)


def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of x from that of the output ``y``."""
    rows, outputs = as_rows(grad), as_rows(y)
    out = torch.empty_like(outputs)
    columns = rows.shape[1]
    block = row_block(columns)
    grid = (rows.shape[0] if columns else 0,)
    launch(
        _softmax_backward_kernel, grid, rows, outputs, out, columns, BLOCK=block, num_warps=warps_for(block)
    )
    return out.view(y.shape)
