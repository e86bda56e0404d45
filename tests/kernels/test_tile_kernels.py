"""A kernel of ``dlo_lib.tiles`` becomes a kernel of Triton, as it does with tensors on a GPU."""

import pytest
import torch

import dlo_lib.tiles as triton
import dlo_lib.tiles.language as tl
from dlo_lib.kernels.dispatch import has_triton
from tests.kernels.parity import NO_TRITON


@triton.jit
def scaled_kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    """y = scale x."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, scale * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_triton_runs_a_tile_kernel() -> None:
    x, y = torch.arange(100.0), torch.zeros(100)
    scaled_kernel._real()[(triton.cdiv(100, 32),)](x, y, 100, 0.5, BLOCK=32)
    assert torch.equal(y, 0.5 * x)
