"""Kernels of ``dlo_lib.kernels.grouped_matmul``. A program computes one tile of the output of one expert.

With ``BULK`` the copy engine of an H100 (TMA) reads the tiles: one thread requests a tile by its place in the
tensor, where the other form computes an address for each 16 bytes. ``TURNED`` says that the inner dimension
of the weights is the contiguous one, as in the gradient of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import cdiv
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.products import dot
from dlo_lib.kernels.triton_code.rows import in_bulk, load, workspace
from dlo_lib.kernels.triton_code.tuning import planned, tuned


@triton.jit
def _forward_kernel(
    rows_ptr, weights_ptr, counts_ptr, out_ptr, total, experts, inner, columns, row_tiles,
    r_row, r_in, w_expert, w_in, w_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    BULK: tl.constexpr, TURNED: tl.constexpr, EVEN_INNER: tl.constexpr, EVEN_COLS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % row_tiles
    first_col = tl.program_id(0) // row_tiles * COLS
    expert = tl.full((), -1, tl.int64)
    start = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int64)
    tiles_before = tl.full((), 0, tl.int64)
    rows_before = tl.full((), 0, tl.int64)
    for candidate in range(0, experts):  # the tiles of an expert follow those of the previous one
        # Counts whose sum is wrong reach no row before the first one or after the last one.
        count = tl.minimum(tl.maximum(tl.load(counts_ptr + candidate), 0), total - rows_before)
        tiles = (count + ROWS - 1) // ROWS
        found = (tile >= tiles_before) & (tile < tiles_before + tiles)
        expert = tl.where(found, candidate, expert)
        start = tl.where(found, rows_before + (tile - tiles_before) * ROWS, start)
        end = tl.where(found, rows_before + count, end)
        tiles_before += tiles
        rows_before += count
    cols = first_col.to(tl.int64) + tl.arange(0, COLS)
    if expert >= 0:
        rows = start + tl.arange(0, ROWS)
        acc = tl.zeros((ROWS, COLS), tl.float32)
        if BULK:  # rows after the last one of the expert are those of the next; they are not stored
            a_of = tl.make_tensor_descriptor(
                rows_ptr, shape=[total, inner], strides=[r_row, 1], block_shape=[ROWS, INNER]
            )
            if TURNED:
                b_of = tl.make_tensor_descriptor(
                    weights_ptr + expert * w_expert, shape=[columns, inner], strides=[w_out, 1],
                    block_shape=[COLS, INNER],
                )  # fmt: skip
            else:
                b_of = tl.make_tensor_descriptor(
                    weights_ptr + expert * w_expert, shape=[inner, columns], strides=[w_in, 1],
                    block_shape=[INNER, COLS],
                )  # fmt: skip
            row = start.to(tl.int32)
            for first in range(0, inner, INNER):
                b = tl.trans(b_of.load([first_col, first])) if TURNED else b_of.load([first, first_col])
                acc = dot(a_of.load([row, first]), b, acc)
        else:
            ins = tl.arange(0, INNER)
            # Rows after the last one of the expert repeat it instead of being masked.
            a_at = rows_ptr + tl.minimum(rows, end - 1)[:, None] * r_row + ins[None, :] * r_in
            b_at = weights_ptr + expert * w_expert + ins[:, None] * w_in + cols[None, :] * w_out
            for first in range(0, inner, INNER):
                left = inner - first
                a = load(a_at, ins[None, :] < left, 0.0, EVEN_INNER)
                in_b = (ins[:, None] < left) & (cols[None, :] < columns)
                acc = dot(a, load(b_at, in_b, 0.0, EVEN_INNER and EVEN_COLS), acc)
                a_at += INNER * r_in
                b_at += INNER * w_in
        out_at = out_ptr + rows[:, None] * columns + cols[None, :]
        tl.store(out_at, acc, mask=(rows[:, None] < end) & (cols[None, :] < columns))
    else:  # the tiles after those of the experts are at least as many as the rows after them fill
        rows = rows_before + (tile - tiles_before) * ROWS + tl.arange(0, ROWS)
        out_at = out_ptr + rows[:, None] * columns + cols[None, :]
        nothing = tl.zeros((ROWS, COLS), tl.float32)
        tl.store(out_at, nothing, mask=(rows[:, None] < total) & (cols[None, :] < columns))


@triton.jit
def _weight_gradient_kernel(
    rows_ptr, grad_ptr, counts_ptr, out_ptr, total, experts, inner, columns, col_tiles,
    r_row, r_in, g_row, g_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // experts
    expert = (tl.program_id(0) % experts).to(tl.int64)
    start = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int64)
    for candidate in range(0, expert + 1):  # as in the forward, no row before the first or after the last one
        start = end
        end += tl.minimum(tl.maximum(tl.load(counts_ptr + candidate), 0), total - end)
    first_in, first_col = tile // col_tiles * INNER, tile % col_tiles * COLS
    ins = first_in.to(tl.int64) + tl.arange(0, INNER)
    cols = first_col.to(tl.int64) + tl.arange(0, COLS)
    acc = tl.zeros((INNER, COLS), tl.float32)
    row = tl.arange(0, ROWS)
    in_ins, in_cols = ins[:, None] < inner, cols[None, :] < columns
    whole = start + (end - start) // ROWS * ROWS
    if BULK:
        a_of = tl.make_tensor_descriptor(
            rows_ptr, shape=[total, inner], strides=[r_row, 1], block_shape=[ROWS, INNER]
        )
        g_of = tl.make_tensor_descriptor(
            grad_ptr, shape=[total, columns], strides=[g_row, 1], block_shape=[ROWS, COLS]
        )
        for first in range(start.to(tl.int32), whole.to(tl.int32), ROWS):
            acc = dot(tl.trans(a_of.load([first, first_in])), g_of.load([first, first_col]), acc)
    else:
        a_at = rows_ptr + (start + row)[None, :] * r_row + ins[:, None] * r_in
        g_at = grad_ptr + (start + row)[:, None] * g_row + cols[None, :] * g_out
        for _ in range(start, whole, ROWS):
            acc = dot(load(a_at, in_ins, 0.0, EVEN), load(g_at, in_cols, 0.0, EVEN), acc)
            a_at += ROWS * r_row
            g_at += ROWS * g_row
    if whole < end:
        left = end - whole
        a_at = rows_ptr + (whole + row)[None, :] * r_row + ins[:, None] * r_in
        g_at = grad_ptr + (whole + row)[:, None] * g_row + cols[None, :] * g_out
        a = tl.load(a_at, mask=(row[None, :] < left) & in_ins, other=0.0)
        g = tl.load(g_at, mask=(row[:, None] < left) & in_cols, other=0.0)
        acc = dot(a, g, acc)
    out_at = out_ptr + (expert * inner + ins[:, None]) * columns + cols[None, :]
    tl.store(out_at, acc, mask=in_ins & in_cols)


def grouped_forward(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return (R, N) from rows (R, K), weights (experts, K, N) with any strides, and counts (experts,).
    Rows after the last expert are 0."""
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    bulk = in_bulk(rows) and (in_bulk(weights) or in_bulk(weights.mT))
    shape = rows.shape[0], *weights.shape
    _prepare_forward(rows.device, rows.dtype, shape, rows.stride(), weights.stride(), bulk)(
        rows, weights, counts, out
    )
    return out


@planned
def _prepare_forward(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], r_strides: tuple[int, ...],
    w_strides: tuple[int, ...], bulk: bool,
) -> PreparedLaunch:  # fmt: skip
    total, experts, inner, columns = shape
    turned = w_strides[1] == 1 and w_strides[2] != 1
    tiles = tuned("grouped_matmul.forward", device, dtype=dtype, turned=turned)
    tiles["BULK"] = bool(tiles.get("BULK")) and bulk
    row_tiles = cdiv(total, tiles["ROWS"]) + experts  # an expert has at most one partial tile
    even = {"EVEN_INNER": inner % tiles["INNER"] == 0, "EVEN_COLS": columns % tiles["COLS"] == 0}
    numbers = (total, experts, inner, columns, row_tiles, *r_strides, *w_strides)
    grid = row_tiles * cdiv(columns, tiles["COLS"]) if total else 0
    allocate = workspace if tiles["BULK"] else None
    return PreparedLaunch(_forward_kernel, grid, numbers, {"TURNED": turned, **even, **tiles}, allocate)


def grouped_weight_gradient(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient of the weights (experts, K, N)."""
    shape = rows.shape[0], counts.shape[0], rows.shape[1], grad.shape[1]
    out = rows.new_empty(shape[1:])
    bulk = in_bulk(rows) and in_bulk(grad)
    _prepare_gradient(rows.device, rows.dtype, shape, rows.stride(), grad.stride(), bulk)(
        rows, grad, counts, out
    )
    return out


@planned
def _prepare_gradient(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], r_strides: tuple[int, ...],
    g_strides: tuple[int, ...], bulk: bool,
) -> PreparedLaunch:  # fmt: skip
    _, experts, inner, columns = shape
    tiles = tuned("grouped_matmul.weight_gradient", device, dtype=dtype)
    tiles["BULK"] = bool(tiles.get("BULK")) and bulk
    col_tiles = cdiv(columns, tiles["COLS"])
    tiles["EVEN"] = inner % tiles["INNER"] == 0 and columns % tiles["COLS"] == 0
    numbers = (*shape, col_tiles, *r_strides, *g_strides)
    grid = experts * cdiv(inner, tiles["INNER"]) * col_tiles
    allocate = workspace if tiles["BULK"] else None
    return PreparedLaunch(_weight_gradient_kernel, grid, numbers, tiles, allocate)
