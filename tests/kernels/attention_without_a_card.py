"""Starts the attention on the driver of ``without_a_card``, and prints what went wrong.

CPU tensors pretend to be on device 0. A call whose launch is prepared should pass to the launcher what the
first call of its shapes, which goes through Triton, has passed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from dlo_lib.kernels import KernelBackend, dispatch, flash_attention, using
from dlo_lib.kernels.triton_code import flash_attention as code
from dlo_lib.kernels.triton_code.tuning import compiled_for
from tests.kernels.without_a_card import ASKED, LAUNCHES, Driver, plain


def inputs(offset: int, seq: int = 64, dim: int = 64) -> list[Tensor]:
    """Return q, k, v and a gradient with the strides of heads that are cut from a projection, ``offset``
    elements after an aligned address."""
    made = []
    for heads in (4, 2, 2, 4):
        flat = torch.zeros(seq * heads * dim + 8, dtype=torch.bfloat16)
        made.append(flat[offset : offset + seq * heads * dim].view(1, seq, heads, dim).transpose(1, 2))
    return made


def call(tensors: list[Tensor]) -> list[list[Any]]:
    """Run forward and backward, and return the launches."""
    LAUNCHES.clear()
    q, k, v, grad = tensors
    out, lse = code.attention_forward(q, k, v, True)
    code.attention_backward(grad, q, k, v, out, lse, True)
    return [plain(args) for args in LAUNCHES]


def without_results(launch: list[Any], tensors: list[Tensor]) -> list[Any]:
    """Return a launch without the addresses of what was allocated in the call, which differ."""
    known = {tensor.data_ptr() for tensor in tensors}
    return [arg for arg in launch if not (isinstance(arg, int) and arg > 1 << 32 and arg not in known)]


def main() -> None:
    driver.set_active(Driver())
    torch.Tensor.get_device = lambda self: 0
    torch._C._cuda_getDevice = lambda: 0
    dispatch._require_possible = lambda tensor: None
    with compiled_for(90), using(KernelBackend.TRITON), torch.no_grad():
        for offset, prepared in ((0, True), (1, False)):
            tensors = inputs(offset)
            first = call(tensors)
            asked = ASKED[0]
            second = call(tensors)
            if len(first) != 3:
                print(f"{len(first)} launches")
            for theirs, ours in zip(first, second):
                if without_results(theirs, tensors) != without_results(ours, tensors):
                    print(f"the launcher received {ours} instead of {theirs}")
            kept = sum(launch._binary is not None for launch in code._PREPARED.values())
            if kept != 3 * prepared:
                print(f"{kept} launches are prepared, {offset} elements after an aligned address")
            code._PREPARED.clear()
            if ASKED[0] != asked:
                print("the second call went through Triton")
        if "--time" in sys.argv:
            tensors = inputs(0)
            q, k, v, grad = tensors
            out, lse = code.attention_forward(q, k, v, True)
            for name, action in {
                "flash_attention": lambda: flash_attention(q, k, v, True),
                "attention_forward": lambda: code.attention_forward(q, k, v, True),
                "attention_backward": lambda: code.attention_backward(grad, q, k, v, out, lse, True),
                "empty": lambda: (torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32)),
            }.items():
                best = float("inf")
                for _ in range(300):
                    began = time.perf_counter()
                    for _ in range(20):
                        action()
                    best = min(best, (time.perf_counter() - began) / 20)
                    LAUNCHES.clear()
                print(f"{name} {1e6 * best:.1f} us")


if __name__ == "__main__":
    main()
