"""Kernel of ``dlo_lib.kernels.vector_add``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.rows import flat


@triton.jit
def _add_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    x_at, y_at, z_at = x_ptr + start + offsets, y_ptr + start + offsets, z_ptr + start + offsets
    if start + BLOCK <= n:  # a whole block needs no mask, so that its loads have 16 bytes for any n
        tl.store(z_at, tl.load(x_at).to(tl.float32) + tl.load(y_at).to(tl.float32))
    else:
        mask = start + offsets < n
        x = tl.load(x_at, mask=mask).to(tl.float32)
        y = tl.load(y_at, mask=mask).to(tl.float32)
        tl.store(z_at, x + y, mask=mask)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y of two tensors of one shape and dtype."""
    x, y = x.contiguous(), y.contiguous()
    z = torch.empty_like(x)
    flat("vector_add", _add_kernel, x.device, x.dtype, x.numel())(x, y, z)
    return z
