"""Kernels of ``dlo_lib.kernels.rms_norm`` and ``dlo_lib.kernels.layer_norm``.

A program of the forward computes one row. A program of the backward computes every P-th row, and sums its
part of the gradients of weight and bias in registers; P is about the number of programs that run at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import as_rows, launch, programs_at_once, row_block, warps_for


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    r_ptr,
    columns,
    eps,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x_raw = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0)
    x = x_raw.to(tl.float32)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 0) / columns
        x = tl.where(mask, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(r_ptr + row, r)
    if CENTRED:
        bias = tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = x * r * weight + bias
    else:  # rounded before the product with the weight, as in Llama
        y = (x * r).to(x_raw.dtype).to(tl.float32) * weight
    tl.store(y_ptr + row * columns + offsets, y, mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, r_ptr, grad_x_ptr, parts_w_ptr, parts_b_ptr,
    rows, columns, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    part_w = tl.zeros((BLOCK,), tl.float32)
    part_b = tl.zeros((BLOCK,), tl.float32)
    for row_number in range(program, rows, tl.num_programs(0)):
        row = tl.cast(row_number, tl.int64)
        x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row)
        if CENTRED:
            x = x - tl.load(mean_ptr + row)
        normed = x * r
        scaled = grad * weight
        grad_x = scaled - normed * (tl.sum(scaled * normed, 0) / columns)
        if CENTRED:
            grad_x -= tl.sum(scaled, 0) / columns
            part_b += grad
        part_w += grad * normed
        tl.store(grad_x_ptr + row * columns + offsets, grad_x * r, mask=mask)
    tl.store(parts_w_ptr + program * columns + offsets, part_w, mask=mask)
    if CENTRED:
        tl.store(parts_b_ptr + program * columns + offsets, part_b, mask=mask)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the output and r (rows,) fp32."""
    y = torch.empty_like(
        x, dtype=torch.promote_types(x.dtype, weight.dtype), memory_format=torch.contiguous_format
    )
    r = _forward(x, weight, weight, y, None, eps)
    return y, r


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the mean (rows,) and r (rows,), both fp32."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = torch.empty(as_rows(x).shape[0], dtype=torch.float32, device=x.device)
    r = _forward(x, weight, bias, y, mean, eps)
    return y, mean, r


def _forward(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mean: Tensor | None, eps: float) -> Tensor:
    rows = as_rows(x)
    r = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    block = row_block(rows.shape[1])
    launch(
        _forward_kernel, (rows.shape[0] if rows.shape[1] else 0,),
        rows, weight.contiguous(), bias.contiguous(), y, r if mean is None else mean, r, rows.shape[1], eps,
        CENTRED=mean is not None, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return r


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    grad_x, grad_weight, _ = _backward(grad, x, weight, None, r)
    return grad_x, grad_weight


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weight and of the bias."""
    return _backward(grad, x, weight, mean, r)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, r: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    grad_x = torch.empty_like(rows)
    programs = min(rows.shape[0], programs_at_once(x.device))
    parts_w = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=x.device)
    parts_b = torch.empty_like(parts_w) if mean is not None else parts_w
    block = row_block(rows.shape[1])
    launch(
        _backward_kernel, (programs if rows.shape[1] else 0,),
        as_rows(grad), rows, weight.contiguous(), r if mean is None else mean, r, grad_x, parts_w, parts_b,
        *rows.shape, CENTRED=mean is not None, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    grad_weight, grad_bias = parts_w.sum(0).to(weight.dtype), parts_b.sum(0).to(weight.dtype)
    return grad_x.view(x.shape), grad_weight, grad_bias
