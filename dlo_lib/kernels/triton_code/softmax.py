"""Kernels of ``dlo_lib.kernels.softmax``. A program computes ROWS rows, each read and written once; a row of
more than ``LONGEST_ROW`` elements is read twice, block after block.

The backward does not write over the gradient of the output, which autograd may give to other operations as
well, nor over the output, which belongs to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.dispatch import LONGEST_ROW
from dlo_lib.kernels.triton_code.launch import cdiv, row_block
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.rows import combine, grow, load, store
from dlo_lib.kernels.triton_code.tuning import planned, tuned


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    offsets = row * columns + column
    mask = (first + row < rows) & (column < columns)
    x = load(x_ptr + first * columns + offsets, mask, float("-inf"), EVEN).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 1)[:, None])
    inverse = 1.0 / tl.sum(weights, 1)
    store(y_ptr + first * columns + offsets, weights * inverse[:, None], mask, EVEN)


@triton.jit
def _softmax_backward_kernel(
    grad_ptr, y_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    offsets = row * columns + column
    mask = (first + row < rows) & (column < columns)
    grad = load(grad_ptr + first * columns + offsets, mask, 0.0, EVEN).to(tl.float32)
    y = load(y_ptr + first * columns + offsets, mask, 0.0, EVEN).to(tl.float32)
    mean = tl.sum(grad * y, 1)
    store(out_ptr + first * columns + offsets, y * (grad - mean[:, None]), mask, EVEN)


@triton.jit
def _long_softmax_kernel(
    x_ptr, y_ptr, columns, LANES: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    BLOCK: tl.constexpr = LANES * VECTOR
    # Each lane keeps the maximum and the sum of its elements; the lanes are combined after the loop.
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for block in tl.range(0, columns, BLOCK, num_stages=STAGES):
        x = tl.load(x_ptr + start + block + offsets, mask=block + offsets < columns, other=float("-inf"))
        largest, total = grow(largest, total, x.to(tl.float32))
    maximum, total_of_row = combine(largest, total)
    inverse = 1.0 / total_of_row
    for block in tl.range(0, columns, BLOCK, num_stages=STAGES):
        mask = block + offsets < columns
        x = tl.load(x_ptr + start + block + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + start + block + offsets, tl.exp(x - maximum) * inverse, mask=mask)


@triton.jit
def _long_softmax_backward_kernel(
    grad_ptr, y_ptr, out_ptr, columns, LANES: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    BLOCK: tl.constexpr = LANES * VECTOR
    products = tl.zeros((LANES, VECTOR), tl.float32)
    for block in tl.range(0, columns, BLOCK, num_stages=STAGES):
        mask = block + offsets < columns
        grad = tl.load(grad_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        products += grad * y
    mean = tl.sum(tl.sum(products, 1), 0)
    for block in tl.range(0, columns, BLOCK, num_stages=STAGES):
        mask = block + offsets < columns
        grad = tl.load(grad_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + start + block + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + start + block + offsets, y * (grad - mean), mask=mask)


def softmax_forward(x: Tensor) -> Tensor:
    """Return the softmax of x (..., n) over its last dimension, contiguous."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _start("softmax.forward", _softmax_kernel, _long_softmax_kernel, x, y)
    return y


def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of x from that of the output ``y``, contiguous."""
    grad, y = grad.contiguous(), y.contiguous()
    out = torch.empty_like(y)
    _start("softmax.backward", _softmax_backward_kernel, _long_softmax_backward_kernel, grad, y, out)
    return out


def _start(name: str, kernel: Any, long_kernel: Any, *tensors: Tensor) -> None:
    """Start ``kernel`` on the rows of contiguous tensors of one shape; ``long_kernel`` if they are long."""
    x = tensors[0]
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    _prepare(name, kernel, long_kernel, x.device, x.dtype, rows, columns)(*tensors)


@planned
def _prepare(
    name: str,
    kernel: Any,
    long_kernel: Any,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
) -> PreparedLaunch:
    if columns > LONGEST_ROW:
        tiles = {"VECTOR": 16 // dtype.itemsize, **tuned("softmax.long", device)}
        return PreparedLaunch(long_kernel, rows, (columns,), tiles)
    block = row_block(columns)
    tiles = tuned(name, device, block=block, bytes=block * dtype.itemsize)
    held = tiles["ROWS"]
    meta = {"BLOCK": block, "EVEN": block == columns and rows % held == 0, **tiles}
    return PreparedLaunch(kernel, cdiv(rows, held), (rows, columns), meta)
