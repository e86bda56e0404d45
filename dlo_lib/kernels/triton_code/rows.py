"""What the kernels of rows share: loads and stores without a mask where a tile is whole, and the sums of the
parts that programs leave.

A tile holds ROWS rows of BLOCK elements, a power of two. Row and column of an element are 32-bit offsets from
the first element of the tile, whose offset has 64 bits. A thread accesses 16 bytes at a time, provided that
the compiler knows that the rows begin at multiples of 16 elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import cdiv, multiprocessors
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.products import INTERPRETED
from dlo_lib.kernels.triton_code.tuning import planned, tuned


@triton.jit
def load(at, mask, other, EVEN: tl.constexpr):
    """Load a tile; EVEN says that the whole tile exists, so that there is nothing to mask."""
    return tl.load(at) if EVEN else tl.load(at, mask=mask, other=other)


@triton.jit
def load_again(at, mask, other, EVEN: tl.constexpr):
    """Load a tile a second time, from the cache, so that no register holds it meanwhile. With the hint it is
    another load for the compiler, which would take the values of the first one."""
    if EVEN:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=mask, other=other, eviction_policy="evict_first")
    return tile


@triton.jit
def again(tile):
    """Return the tile, 16-bit or fp32, as another value for the compiler, which would otherwise keep a
    conversion of it in registers instead of computing it again."""
    if INTERPRETED:
        return tile
    elif tile.dtype.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=2)


@triton.jit
def store(at, tile, mask, EVEN: tl.constexpr):
    """Store a tile; EVEN as for ``load``."""
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=mask)


@triton.jit
def grow(largest, total, x):
    """Return the maximum (LANES,) and the sum of exp(x - maximum) (LANES,) of each lane after another tile x
    (LANES, VECTOR). The old sum is rescaled once for VECTOR elements, so that almost one exponential is
    computed for each."""
    new = tl.maximum(largest, tl.max(x, 1))
    # The difference of two infinities is NaN: as long as a lane has seen only -inf, subtract 0.
    finite = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp(largest - finite) + tl.sum(tl.exp(x - finite[:, None]), 1)
    return new, total


@triton.jit
def combine(largest, total):
    """Return the maximum and the sum of a row from those of its lanes."""
    maximum = tl.max(largest, 0)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    return maximum, tl.sum(total * tl.exp(largest - finite), 0)


@triton.jit
def _sum_parts_kernel(
    parts_ptr, first_ptr, second_ptr, parts, columns, blocks, PARTS: tl.constexpr, COLS: tl.constexpr
):
    kind, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    cols = block * COLS + tl.arange(0, COLS)[None, :]
    part = tl.arange(0, PARTS)[:, None]
    at = parts_ptr + kind.to(tl.int64) * parts * columns + part * columns + cols
    total = tl.zeros((PARTS, COLS), tl.float32)
    for start in range(0, parts, PARTS):
        mask = (start + part < parts) & (cols < columns)
        total += tl.load(at + tl.cast(start, tl.int64) * columns, mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(total, 0)[None, :]
    if kind == 0:
        tl.store(first_ptr + cols, out, mask=cols < columns)
    else:
        tl.store(second_ptr + cols, out, mask=cols < columns)


def sum_parts(parts: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Sum ``parts`` (1 or 2, P, columns), contiguous, over P: write the sums of the first to ``first``
    (columns,) and those of the second, if there are any, to ``second``. P may be 0."""
    kinds, count, columns = parts.shape
    second = first if second is None else second
    _prepare_sums(parts.device, parts.dtype, first.dtype, kinds, count, columns)(parts, first, second)


@planned
def _prepare_sums(
    device: torch.device, dtype: torch.dtype, out: torch.dtype, kinds: int, count: int, columns: int
) -> PreparedLaunch:
    tiles = tuned("rows.sum_parts", device, columns=columns, parts=count)
    blocks = cdiv(columns, tiles["COLS"])
    return PreparedLaunch(_sum_parts_kernel, kinds * blocks, (count, columns, blocks), tiles)


@planned
def flat(name: str, kernel: Any, device: torch.device, dtype: torch.dtype, n: int) -> PreparedLaunch:
    """Return the launch of ``kernel`` with contiguous tensors of n elements, BLOCK of them for a program."""
    tiles = tuned(name, device)
    return PreparedLaunch(kernel, cdiv(n, tiles["BLOCK"]), (n,), tiles)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; without one 132, as an H100 has, and on a CPU 3,
    fewer than the rows of a test."""
    if device.type == "cuda":
        return multiprocessors(device)
    return 3 if device.type == "cpu" else 132


def vector_of(tensor: Tensor) -> int:
    """Return the number of elements in 16 bytes."""
    return 16 // tensor.element_size()


def in_bulk(x: Tensor) -> bool:
    """Return whether the copy engine can read the matrices of x: contiguous rows, in units of 16 bytes."""
    unit, strides = vector_of(x), x.stride()
    aligned = x.data_ptr() % 16 == 0 and all(stride and stride % unit == 0 for stride in strides[:-1])
    return aligned and strides[-1] == 1 and x.numel() > 0


def workspace(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the memory in which programs store their descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
