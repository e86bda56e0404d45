"""Kernels of ``dlo_lib.kernels.grouped_matmul``. A program computes one tile of the output of one expert."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import cdiv, launch
from dlo_lib.kernels.triton_code.products import dot
from dlo_lib.kernels.triton_code.rows import load
from dlo_lib.kernels.triton_code.tuning import tuned


@triton.jit
def _forward_kernel(
    rows_ptr, weights_ptr, counts_ptr, out_ptr, experts, inner, columns,
    r_row, r_in, w_expert, w_in, w_out, o_row, o_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    EVEN_INNER: tl.constexpr, EVEN_COLS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.full((), -1, tl.int64)
    start = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int64)
    tiles_before = tl.full((), 0, tl.int64)
    rows_before = tl.full((), 0, tl.int64)
    for candidate in range(0, experts):  # the tiles of an expert follow those of the previous one
        count = tl.load(counts_ptr + candidate)
        tiles = (count + ROWS - 1) // ROWS
        found = (tile >= tiles_before) & (tile < tiles_before + tiles)
        expert = tl.where(found, candidate, expert)
        start = tl.where(found, rows_before + (tile - tiles_before) * ROWS, start)
        end = tl.where(found, rows_before + count, end)
        tiles_before += tiles
        rows_before += count
    if expert >= 0:
        rows = start + tl.arange(0, ROWS)
        cols = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
        ins = tl.arange(0, INNER)
        # Rows after the last one of the expert repeat it instead of being masked; they are not stored.
        a_at = rows_ptr + tl.minimum(rows, end - 1)[:, None] * r_row + ins[None, :] * r_in
        b_at = weights_ptr + expert * w_expert + ins[:, None] * w_in + cols[None, :] * w_out
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, inner, INNER):
            left = inner - first
            a = load(a_at, ins[None, :] < left, 0.0, EVEN_INNER)
            b = load(b_at, (ins[:, None] < left) & (cols[None, :] < columns), 0.0, EVEN_INNER and EVEN_COLS)
            acc = dot(a, b, acc)
            a_at += INNER * r_in
            b_at += INNER * w_in
        out_at = out_ptr + rows[:, None] * o_row + cols[None, :] * o_out
        tl.store(out_at, acc, mask=(rows[:, None] < end) & (cols[None, :] < columns))


@triton.jit
def _weight_gradient_kernel(
    rows_ptr, grad_ptr, counts_ptr, out_ptr, inner, columns, r_row, r_in, g_row, g_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    start = tl.full((), 0, tl.int64)
    for before in range(0, expert):
        start += tl.load(counts_ptr + before)
    end = start + tl.load(counts_ptr + expert)
    ins = tl.program_id(1).to(tl.int64) * INNER + tl.arange(0, INNER)
    cols = tl.program_id(2).to(tl.int64) * COLS + tl.arange(0, COLS)
    acc = tl.zeros((INNER, COLS), tl.float32)
    row = tl.arange(0, ROWS)
    a_at = rows_ptr + (start + row)[None, :] * r_row + ins[:, None] * r_in
    g_at = grad_ptr + (start + row)[:, None] * g_row + cols[None, :] * g_out
    in_ins, in_cols = ins[:, None] < inner, cols[None, :] < columns
    whole = start + (end - start) // ROWS * ROWS
    for _ in range(start, whole, ROWS):
        a, g = load(a_at, in_ins, 0.0, EVEN), load(g_at, in_cols, 0.0, EVEN)
        acc = dot(a, g, acc)
        a_at += ROWS * r_row
        g_at += ROWS * g_row
    if whole < end:
        left = end - whole
        a = tl.load(a_at, mask=(row[None, :] < left) & in_ins, other=0.0)
        g = tl.load(g_at, mask=(row[:, None] < left) & in_cols, other=0.0)
        acc = dot(a, g, acc)
    out_at = out_ptr + (expert * inner + ins[:, None]) * columns + cols[None, :]
    tl.store(out_at, acc, mask=(ins[:, None] < inner) & (cols[None, :] < columns))


def grouped_forward(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return (R, N) from rows (R, K), weights (experts, K, N) with any strides, and counts (experts,)."""
    experts, inner, columns = weights.shape
    out = rows.new_zeros(rows.shape[0], columns)  # rows after the last expert keep 0
    tiles = tuned("grouped_matmul.forward", rows.device, dtype=rows.dtype)
    row_tiles = cdiv(rows.shape[0], tiles["ROWS"]) + experts  # an expert has at most one partial tile
    launch(
        _forward_kernel, (row_tiles if rows.shape[0] else 0, cdiv(columns, tiles["COLS"])), rows,
        weights, counts, out, experts, inner, columns, *rows.stride(), *weights.stride(), *out.stride(),
        EVEN_INNER=inner % tiles["INNER"] == 0, EVEN_COLS=columns % tiles["COLS"] == 0, **tiles,
    )  # fmt: skip
    return out


def grouped_weight_gradient(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient of the weights (experts, K, N)."""
    experts, inner, columns = counts.shape[0], rows.shape[1], grad.shape[1]
    out = rows.new_empty(experts, inner, columns)
    tiles = tuned("grouped_matmul.weight_gradient", rows.device, dtype=rows.dtype)
    grid = (experts, cdiv(inner, tiles["INNER"]), cdiv(columns, tiles["COLS"]))
    even = inner % tiles["INNER"] == 0 and columns % tiles["COLS"] == 0
    launch(
        _weight_gradient_kernel, grid,
        rows, grad, counts, out, inner, columns, *rows.stride(), *grad.stride(), EVEN=even, **tiles,
    )  # fmt: skip
    return out
