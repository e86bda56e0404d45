"""A driver of Triton that needs no GPU: kernels are compiled for sm_90, and their launches are recorded.

``test_launch`` runs this file in a separate process, because Triton interprets the kernels of the tests. It
prints what went wrong, and nothing if ``start`` passes the same to the launcher as Triton.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from dlo_lib.kernels.triton_code import binaries

LAUNCHES: list[tuple[Any, ...]] = []
"""What the launcher received: the grid, the stream, the handle of the binary, ..., the arguments."""
ASKED = [0]
"""How often Triton asked for the current device, once for each call through Triton."""


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        LAUNCHES.append(args)


class _Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return "module", hash(kernel), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def unload_module(self, module: Any) -> None:
        pass


class Driver:
    """A GPU of compute capability 9.0 that records launches."""

    launcher_cls = _Launcher
    utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        ASKED[0] += 1
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


@triton.jit
def _kernel(x_ptr, y_ptr, n, stride, scale, flag, SIGN: tl.constexpr, BLOCK: tl.constexpr = 16):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets * stride, mask=offsets < n).to(tl.float32)
    tl.store(y_ptr + offsets, x * scale * SIGN, mask=(offsets < n) & flag)


@triton.jit
def _described(descriptor, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.reshape(descriptor.load([0]), (BLOCK,)))


def drawn(generator: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of ``_kernel``."""
    pool = torch.zeros(64, dtype=generator.choice([torch.float32, torch.bfloat16]))
    x, y = (pool[generator.choice([0, 8, 1]) :] for _ in range(2))
    n, stride = generator.choice([32, 33, 2**31 + 16]), generator.choice([1, 48, 5])
    meta = {"SIGN": generator.choice([-1, 1]), "num_warps": generator.choice([1, 2])}
    if generator.random() < 0.5:
        meta = dict(reversed(meta.items())) | {"BLOCK": generator.choice([16, 32])}
    return (x, y, n, stride, generator.choice([1.0, 0.5]), generator.random() < 0.5), meta


def plain(args: Any) -> list[Any]:
    """Return the arguments of a launcher, with addresses instead of tensors and without metadata or hooks."""
    *start, _, _, _ = args[:9]
    return start + [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args[9:]]


def compare(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> str:
    """Return what differs between a call through Triton and two of ``start``."""
    LAUNCHES.clear()
    kernel[(3, 2)](*args, **meta)
    binaries.start(kernel, (3, 2), args, meta, 0)
    asked = ASKED[0]
    binaries.start(kernel, (3, 2), args, meta, 0)
    theirs, ours, again = map(plain, LAUNCHES)
    if not theirs == ours == again:
        return f"the launcher received {again} instead of {theirs}"
    return "" if ASKED[0] == asked else "the second call went through Triton"


def through_triton(args: tuple[Any, ...], meta: dict[str, Any]) -> bool:
    """Return whether ``start`` calls Triton for ``_kernel``."""
    asked = ASKED[0]
    with contextlib.suppress(TypeError):  # raised by Triton, which receives an argument that it does not know
        binaries.start(_kernel, (3, 2), args, meta, 0)
    return ASKED[0] > asked


def python_calls(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> int:
    """Return how many Python functions a repeated call of ``start`` calls, the launcher included."""
    calls = [0]

    def count(frame: Any, event: str, arg: Any) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    binaries.start(kernel, (3, 2), args, meta, 0)
    sys.setprofile(None)
    return calls[0]


def main() -> None:
    driver.set_active(Driver())
    if not binaries.available():
        print(f"Triton {triton.__version__} starts kernels in another way")
        return
    generator = random.Random(0)
    for _ in range(60):
        print(compare(_kernel, *drawn(generator)), end="")
    args, meta = drawn(generator)
    compare(_kernel, args, meta)
    if (count := python_calls(_kernel, args, meta)) > 8:
        print(f"{count} Python functions are called")

    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(lambda metadata: None)
    if not through_triton(args, meta):
        print("a launch hook is ignored")
    hooks.calls.clear()
    if not through_triton((*args[:4], ctypes.c_float(1.0), args[5]), meta):
        print("an argument of an unknown type is classified")
    if through_triton(args, meta):
        print("the binary is not found any more")
    binaries.forget()
    binaries.available = lambda: False
    if not (through_triton(args, meta) and through_triton(args, meta)):
        print("a binary of another version of Triton is started")
    binaries.available = lambda: True

    tables = [torch.zeros(64, dtype=torch.float32), torch.zeros(64, dtype=torch.bfloat16)]
    for table, block in itertools.product(tables, (16, 32)):
        descriptor = TensorDescriptor.from_tensor(table, [block])
        print(compare(_described, (descriptor, torch.zeros(64)), {"BLOCK": block}), end="")


if __name__ == "__main__":
    main()
