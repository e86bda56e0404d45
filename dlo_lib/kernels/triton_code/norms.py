"""Kernels of ``dlo_lib.kernels.rms_norm`` and ``dlo_lib.kernels.layer_norm``.

A program of the forward computes ROWS rows or, with STAGES, every P-th group of ROWS rows, of which it loads
the next one while it computes: a long row leaves room for one program on a multiprocessor, which would wait
for each row. A program of the backward computes every P-th group of ROWS rows,
loads the next one while it computes, and keeps its part of the gradients of weight and bias in registers. P
is the number of programs that run at once, so that the parts are small beside the rows; a second kernel sums
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import cdiv, row_block
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.rows import again, load, load_again, processors, store, sum_parts
from dlo_lib.kernels.triton_code.tuning import planned, tuned


@triton.jit
def _normalise(
    x_ptr, bias_ptr, y_ptr, mean_ptr, r_ptr, weight_raw, bias_raw, first, rows, columns, eps,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the rows from ``first`` on. Without STAGES the bias is loaded here, after the sums."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    offsets = row[:, None] * columns + column
    inside = column < columns
    exists = first + row < rows
    mask = inside & exists[:, None]
    x_raw = load(x_ptr + first * columns + offsets, mask, 0.0, EVEN)
    x = x_raw.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / columns
        x = x - mean[:, None]
        if not WHOLE:
            x = tl.where(inside, x, 0.0)
        store(mean_ptr + first + row, mean, exists, EVEN)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps)
    store(r_ptr + first + row, r, exists, EVEN)
    weight = weight_raw.to(tl.float32)
    if CENTRED:
        bias = bias_raw if STAGES else load(bias_ptr + column, inside, 0.0, WHOLE)
        y = x * r[:, None] * weight + bias.to(tl.float32)
    else:  # rounded before the product with the weight, as in Llama
        y = (x * r[:, None]).to(x_raw.dtype).to(tl.float32) * weight
    store(y_ptr + first * columns + offsets, y, mask, EVEN)


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, r_ptr, rows, columns, eps,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    weight = load(weight_ptr + column, inside, 0.0, WHOLE)
    bias = load(bias_ptr + column, inside, 0.0, WHOLE) if CENTRED and STAGES else weight
    if STAGES:  # weight and bias stay in registers, in their dtype, because the row fills most of them
        for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            _normalise(
                x_ptr, bias_ptr, y_ptr, mean_ptr, r_ptr, again(weight), again(bias), tl.cast(start, tl.int64),
                rows, columns, eps, CENTRED, ROWS, BLOCK, STAGES, WHOLE, EVEN,
            )  # fmt: skip
    else:
        _normalise(
            x_ptr, bias_ptr, y_ptr, mean_ptr, r_ptr, weight, bias, program.to(tl.int64) * ROWS, rows, columns,
            eps, CENTRED, ROWS, BLOCK, STAGES, WHOLE, EVEN,
        )  # fmt: skip


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, r_ptr, grad_x_ptr, parts_ptr, rows, columns,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    offsets = row[:, None] * columns + column
    inside = column < columns
    weight = load(weight_ptr + column, inside, 0.0, WHOLE).to(tl.float32)
    part_w = tl.zeros((ROWS, BLOCK), tl.float32)
    part_b = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        first = tl.cast(start, tl.int64)
        exists = first + row < rows
        mask = inside & exists[:, None]
        x_at, grad_at = x_ptr + first * columns + offsets, grad_ptr + first * columns + offsets
        x_raw, grad_raw = load(x_at, mask, 0.0, EVEN), load(grad_at, mask, 0.0, EVEN)
        x, grad = x_raw.to(tl.float32), grad_raw.to(tl.float32)
        r = load(r_ptr + first + row, exists, 0.0, EVEN)[:, None]
        mean = load(mean_ptr + first + row, exists, 0.0, EVEN)[:, None] if CENTRED else 0.0
        if RELOAD == 3:
            if start < rows:  # always: a load below a condition is no part of the pipeline
                weight = load(weight_ptr + column, inside, 0.0, WHOLE).to(tl.float32)
        elif RELOAD:
            weight = load(weight_ptr + column, inside, 0.0, WHOLE).to(tl.float32)
        scaled = grad * weight
        mean_of_products = tl.sum(scaled * ((x - mean) * r), 1)[:, None] / columns
        mean_of_scaled = tl.sum(scaled, 1)[:, None] / columns if CENTRED else 0.0
        if RELOAD:  # the parts of a long row fill the registers: they hold no fp32 copy of it
            if RELOAD == 1:  # from the cache
                x = load_again(x_at, mask, 0.0, EVEN).to(tl.float32)
                grad = load_again(grad_at, mask, 0.0, EVEN).to(tl.float32)
            else:  # the loaded row, in half of the registers if it has 16 bits
                x, grad = again(x_raw).to(tl.float32), again(grad_raw).to(tl.float32)
            if RELOAD == 3:
                if start < rows:
                    weight = load_again(weight_ptr + column, inside, 0.0, WHOLE).to(tl.float32)
            else:
                weight = load_again(weight_ptr + column, inside, 0.0, WHOLE).to(tl.float32)
        normed = (x - mean) * r
        grad_x = grad * weight - normed * mean_of_products - mean_of_scaled
        part_w += grad * normed
        if BIAS:
            part_b += grad
        store(grad_x_ptr + first * columns + offsets, grad_x * r, mask, EVEN)
    at = parts_ptr + program.to(tl.int64) * columns + column
    store(at, tl.sum(part_w, 0)[None, :], inside, WHOLE)
    if BIAS:  # the parts of the bias follow those of the weight
        at += programs.to(tl.int64) * columns
        store(at, tl.sum(part_b, 0)[None, :], inside, WHOLE)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the output and r (rows,) fp32."""
    dtype = x.dtype if x.dtype is weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    r = _forward(x, weight, weight, y, None, eps)
    return y, r


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the mean (rows,) and r (rows,), both fp32."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = _of_rows(x)
    r = _forward(x, weight, bias, y, mean, eps)
    return y, mean, r


def _of_rows(x: Tensor) -> Tensor:
    """Return an fp32 number for each row of x (..., n), not initialised."""
    return torch.empty(_count_rows(x), dtype=torch.float32, device=x.device)


def _count_rows(x: Tensor) -> int:
    columns = x.shape[-1]
    return x.numel() // columns if columns else x.shape[:-1].numel()


def _forward(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mean: Tensor | None, eps: float) -> Tensor:
    r, columns = _of_rows(x), x.shape[-1]
    start = _prepare_forward(x.device, x.dtype, weight.dtype, r.shape[0], columns, eps, mean is not None)
    mean = r if mean is None else mean
    start(x.contiguous(), weight.contiguous(), bias.contiguous(), y, mean, r)
    return r


@planned
def _prepare_forward(
    device: torch.device, dtype: torch.dtype, weights: torch.dtype, rows: int, columns: int, eps: float,
    centred: bool,
) -> PreparedLaunch:  # fmt: skip
    block = row_block(columns)
    tiles = tuned("norms.forward", device, block=block, bytes=block * dtype.itemsize, centred=centred)
    held, whole = tiles["ROWS"], block == columns
    programs, each = cdiv(rows, held), tiles.pop("programs", 0)
    tiles.setdefault("STAGES", 0)
    if tiles["STAGES"]:
        programs = min(programs, each * processors(device))
    meta = {"CENTRED": centred, "BLOCK": block, "WHOLE": whole, "EVEN": whole and rows % held == 0, **tiles}
    return PreparedLaunch(_forward_kernel, programs if columns else 0, (rows, columns, eps), meta)


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
    """Return the gradients; without a mean there is no bias, and its gradient is that of the weight."""
    columns, rows = x.shape[-1], r.numel()
    programs, both, start = _prepare_backward(
        x.device, x.dtype, weight.dtype, grad.dtype, rows, columns, mean is not None
    )
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    grad_bias = grad_weight if mean is None else torch.empty_like(grad_weight)
    parts = torch.empty(2 if both else 1, programs, columns, dtype=torch.float32, device=x.device)
    grad, r = grad.contiguous(), r.contiguous()
    start(grad, x.contiguous(), weight.contiguous(), r if mean is None else mean, r, grad_x, parts)
    sum_parts(parts, grad_weight, grad_bias if both else None)
    if mean is not None and not both:
        sum_parts(grad.view(1, rows, columns), grad_bias)
    return grad_x, grad_weight, grad_bias


@planned
def _prepare_backward(
    device: torch.device, dtype: torch.dtype, weights: torch.dtype, grads: torch.dtype, rows: int,
    columns: int, centred: bool,
) -> tuple[int, bool, PreparedLaunch]:  # fmt: skip
    """Return the number of programs, whether they also sum the gradient of a bias, and the launch."""
    block = row_block(columns)
    tiles = tuned("norms.backward", device, block=block, bytes=block * dtype.itemsize, centred=centred)
    held, whole = tiles["ROWS"], block == columns
    programs = min(cdiv(rows, held), tiles.pop("programs") * processors(device))
    # Where the parts of both do not fit into the registers, the gradient of the bias is a sum of grad.
    both = bool(tiles.pop("BIAS", not tiles["RELOAD"])) and centred
    meta = {"CENTRED": centred, "BLOCK": block, "BIAS": both, "WHOLE": whole, **tiles}
    meta["EVEN"] = whole and rows % held == 0
    start = PreparedLaunch(_backward_kernel, programs if columns else 0, (rows, columns), meta)
    return programs, both, start
