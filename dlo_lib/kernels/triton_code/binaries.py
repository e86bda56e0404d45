"""Starts a kernel with the binary that Triton compiled for arguments of the same types.

``kernel[grid](...)`` computes the specialisation of each argument and makes a text of the options before it
finds the binary, which takes longer than the launch. Triton specialises a pointer by its dtype and whether it
is a multiple of 16 bytes, and an integer by whether it is 1, a multiple of 16, and needs 64 bits. ``start``
computes the same classes in one loop and finds the binary by them. Its key is never coarser than that of
Triton, so that it never finds another binary.

The first call of a key is Triton's own. So is every call with an argument of another type, such as a subclass
of ``Tensor``, with a launch hook, in the interpreter, and with a version of Triton whose ``JITFunction.run``
does not contain ``EXPECTED_CALL``. At each call Triton also checks that the global variables of the kernel
are those of its compilation; ``start`` does not, because the kernels read constants only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

EXPECTED_CALL = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    " knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
)
"""How Triton 3.6 to 3.9 start a compiled kernel, with blanks instead of line breaks."""

MOST_BINARIES = 4096
"""The most keys that are kept. They are forgotten together; Triton keeps the binaries."""


class Binary(NamedTuple):
    """What starts a compiled kernel.

    Attributes:
        kernel: the function that Triton compiled. It is kept, because the key contains its ``id``.
        run: the launcher of Triton.
        function: the handle of the binary on the device.
        metadata: the packed metadata, which ``run`` requires.
        constants: the arguments after those of the call: the values of the ``tl.constexpr`` parameters.
        stream_of: returns the current stream of a device.
    """

    kernel: Any
    run: Callable[..., Any]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    stream_of: Callable[[int], int]


_BINARIES: dict[tuple[Any, ...], Binary] = {}


def start(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], device: int
) -> None:
    """Start ``kernel`` on the current device.

    Args:
        kernel: the result of ``triton.jit``.
        grid: the programs in 1 to 3 dimensions, none of them 0.
        args: the arguments.
        device: the index of the current device.
        meta: the ``tl.constexpr`` parameters and the options, such as ``num_warps``.
    """
    key: list[Any] = [id(kernel), device, tuple(meta), *meta.values()]
    values = classify(args, key)
    if values is None:
        kernel[grid](*args, **meta)
        return
    found = _BINARIES.get(tuple(key))
    if found is None or _watched():
        _keep(tuple(key), kernel, kernel[grid](*args, **meta), len(args), meta)
        return
    blocks = len(grid)
    found.run(
        grid[0], grid[1] if blocks > 1 else 1, grid[2] if blocks > 2 else 1, found.stream_of(device),
        found.function, found.metadata, None, None, None, *values, *found.constants,
    )  # fmt: skip


def classify(args: tuple[Any, ...], key: list[Any]) -> list[Any] | None:
    """Append the class of each argument to ``key``, and return the values that a launcher receives.

    A tensor becomes its address, so that the launcher need not ask the driver for it. Returns None where an
    argument has a type that is not classified here.
    """
    values: list[Any] = []
    key_add, value_add = key.append, values.append
    for arg in args:
        kind = type(arg)
        if kind is int:
            if arg == 1:
                key_add(1)
            elif -0x80000000 <= arg < 0x80000000:
                key_add(3 if arg & 15 else 2)
            else:
                key_add(("u64" if arg >= 1 << 63 else "i64", arg & 15 == 0))
            value_add(arg)
        elif kind is Tensor or kind is Parameter:
            pointer = arg.data_ptr()
            key_add(arg.dtype)
            key_add(pointer & 15 == 0)
            value_add(pointer)
        elif kind is float or kind is bool:
            key_add(kind)
            value_add(arg)
        elif arg is None:
            key_add(None)
            value_add(None)
        elif kind is _descriptor():
            key_add((arg.base.dtype, tuple(arg.block_shape)))
            value_add(arg)
        else:
            return None
    return values


@cache
def available() -> bool:
    """Return whether the installed Triton starts compiled kernels as ``start`` does."""
    from triton.runtime.jit import JITFunction

    source = " ".join(inspect.getsource(JITFunction.run).split())
    if EXPECTED_CALL in source:
        return True
    logging.getLogger(__name__).debug("Triton starts kernels in another way: its own path is used")
    return False


def is_compiled(kernel: Any) -> bool:
    """Return whether ``kernel`` is compiled by Triton itself: neither interpreted nor autotuned."""
    from triton.runtime.jit import JITFunction

    return type(kernel) is JITFunction


def forget() -> None:
    """Forget the binaries."""
    _BINARIES.clear()


def _watched() -> bool:
    """Return whether a profiler or a debugger waits for launches."""
    knobs = _runtime()
    for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        if getattr(hook, "calls", hook):  # a chain of hooks, or one function
            return True
    return bool(knobs.debug)


@cache
def _descriptor() -> type:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def _keep(key: tuple[Any, ...], kernel: Any, compiled: Any, given: int, meta: dict[str, Any]) -> None:
    """Keep the binary of a call, if the parameters after the given arguments are constants."""
    if not (available() and is_compiled(kernel) and not kernel.pre_run_hooks):
        return
    before, after = kernel.params[:given], kernel.params[given:]
    if any(param.is_constexpr for param in before) or not all(param.is_constexpr for param in after):
        return
    if not hasattr(compiled, "packed_metadata") or compiled.function is None:
        return  # compiled in the background, or not started
    from triton.runtime import driver

    constants = tuple(meta.get(param.name, param.default) for param in after)
    if len(_BINARIES) >= MOST_BINARIES:
        _BINARIES.clear()
    _BINARIES[key] = Binary(
        kernel, compiled.run, compiled.function, compiled.packed_metadata, constants,
        driver.active.get_current_stream,
    )  # fmt: skip
