"""Starts the attention on the driver of ``without_a_card``, and prints what went wrong.

CPU tensors pretend to be on device 0. A call whose launch is prepared should pass to the launcher what the
first call of its shapes, which goes through Triton, has passed. No bulk copy of the compiled kernels should
write to an address that is not a multiple of 128.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from dlo_lib.kernels import KernelBackend, dispatch, flash_attention, using
from dlo_lib.kernels.triton_code import flash_attention as code
from dlo_lib.kernels.triton_code.tuning import compiled_for, trying
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
    """Run forward and backward, and return the launches, with names instead of the addresses of what was
    allocated in the call, which differ."""
    LAUNCHES.clear()
    q, k, v, grad = tensors
    out, lse = code.attention_forward(q, k, v, True)
    dq, rows = code.query_gradient(grad, q, k, v, out, lse, True)
    dk, dv = code.key_gradients(grad, q, k, v, rows, True)
    results = {"out": out, "lse": lse, "dq": dq, "rows": rows, "dk": dk, "dv": dv}
    names = {tensor.data_ptr(): name for name, tensor in results.items()}
    return [[*args[:6], *(names.get(arg, arg) for arg in args[6:])] for args in map(plain, LAUNCHES)]


def short_copies() -> set[str]:
    """Return the destinations of the bulk copies of all kernels in Triton's cache that do not have a multiple
    of 128 bytes, so that the next buffer of a pipeline is not aligned."""
    copy = re.compile(r"async_tma_copy_global_to_local .*-> !ttg\.memdesc<([\dx]+)x[a-z]+(\d+),")
    found = set()
    copies = 0
    for file in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ttgir"):
        for match in copy.finditer(file.read_text(encoding="utf-8")):
            copies += 1
            if math.prod(map(int, match[1].split("x"))) * int(match[2]) // 8 % 128:
                found.add(f"{file.stem}: {match[1]} elements of {match[2]} bits")
    return found if copies else {"no bulk copy was found"}


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
                if theirs != ours:
                    print(f"the launcher received {ours} instead of {theirs}")
            kept = sum(launch._binary is not None for launch in code._PREPARED.values())
            if kept != 3 * prepared:
                print(f"{kept} launches are prepared, {offset} elements after an aligned address")
            code._PREPARED.clear()
            if ASKED[0] != asked:
                print("the second call went through Triton")
        if "--time" not in sys.argv:
            with trying("flash_attention.dkv", {"ROWS": 16, "COLS": 32}):
                call(inputs(0))
            for short in sorted(short_copies()):
                print(f"a bulk copy is not a multiple of 128 bytes: {short}")
        else:
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
