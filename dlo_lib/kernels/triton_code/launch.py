"""Starts kernels, or records the launches for the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dlo_lib.kernels.dispatch import LONGEST_ROW
from dlo_lib.kernels.triton_code.binaries import start


@dataclass(frozen=True)
class KernelLaunch:
    """A recorded launch: the kernel, its grid, its arguments by name, and its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


_RECORDER: ContextVar[Callable[[KernelLaunch], None] | None] = ContextVar("recorder", default=None)
OPTIONS = ("num_warps", "num_stages")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start ``kernel`` on ``grid`` on the device of its first tensor; an empty grid starts nothing.

    Args:
        kernel: the result of ``triton.jit``.
        grid: the number of programs in each of 1 to 3 dimensions.
        args: the parameters of the kernel that are not ``tl.constexpr``, in their order.
        meta: the ``tl.constexpr`` parameters and the options, such as ``num_warps``.
    """
    if 0 in grid:
        return
    recorder = _RECORDER.get()
    if recorder is not None:
        options = {name: meta.pop(name) for name in OPTIONS if name in meta}
        recorder(KernelLaunch(kernel, grid, dict(zip(kernel.arg_names, args)) | meta, options))
        return
    first = args[0]
    if not isinstance(first, Tensor):
        first = next(arg for arg in args if isinstance(arg, Tensor))
    device = first.get_device()
    if device < 0:  # interpreted
        kernel[grid](*args, **meta)
    elif device == torch._C._cuda_getDevice():
        start(kernel, grid, args, meta, device)
    else:
        with torch.cuda.device(device):
            start(kernel, grid, args, meta, device)


@contextlib.contextmanager
def recorded() -> Iterator[list[KernelLaunch]]:
    """Record the launches inside the context instead of starting them."""
    launches: list[KernelLaunch] = []
    before = _RECORDER.set(launches.append)
    try:
        yield launches
    finally:
        _RECORDER.reset(before)


def row_block(columns: int, largest: int = LONGEST_ROW) -> int:
    """Return the block for rows of ``columns`` elements: a power of two, ``largest`` at most."""
    return min(power_of_2(columns), largest)


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least ``count`` and 1. Triton's function takes 100
    times as long."""
    return 1 << max(count - 1, 0).bit_length()


def cdiv(count: int, block: int) -> int:
    """Return the number of blocks that hold ``count`` elements. Triton's function takes 100 times as long."""
    return -(-count // block)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; the properties are read once."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
