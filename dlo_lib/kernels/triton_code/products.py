"""The product of two tiles, as every kernel computes it."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc=None):
    """Return a @ b + acc in fp32, without the shortened fp32 inputs (TF32) of tensor cores."""
    if INTERPRETED:
        # The interpreter holds bf16 as 16-bit integers, and would multiply these.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
