"""Chooses between a Triton kernel and its PyTorch twin, and checks what both require of their inputs.

The choice is made for each call, from its first tensor: Triton for a CUDA tensor in fp32, bf16 or fp16 if
Triton is installed, the twin for everything else: a CPU tensor, fp64, a fake tensor, and code that
``torch.compile`` traces, because the compiler fuses the twin itself. ``using`` overrides the choice, for
tests and comparisons.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dlo_lib.errors import UserError

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of the Triton kernels, which compute in fp32."""

LONGEST_ROW = 16384
"""The most elements of a row that one program holds at once. The norms hold whole rows."""


class KernelBackend(enum.Enum):
    """What computes a fused operation."""

    TRITON = "triton"
    TORCH = "torch"


_CHOSEN: ContextVar[KernelBackend | None] = ContextVar("backend of fused kernels", default=None)
_AROUND: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar(
    "what is entered around a twin", default=contextlib.nullcontext
)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed. This does not import it."""
    return find_spec("triton") is not None


@contextlib.contextmanager
def using(backend: KernelBackend) -> Iterator[None]:
    """Use ``backend`` for every fused operation that is called inside the context.

    The backward of an operation uses the backend of its forward.

    Raises:
        UserError: Triton is requested and not installed.
    """
    if backend is KernelBackend.TRITON and not has_triton():
        raise UserError("Triton is not installed: pip install 'dlo-lib[kernels]', or use KernelBackend.TORCH")
    before = _CHOSEN.set(backend)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


def backend_for(tensor: Tensor) -> KernelBackend:
    """Return the backend of a call whose first tensor is ``tensor``.

    Raises:
        UserError: ``using`` requests Triton for a tensor that it cannot process.
    """
    chosen = _CHOSEN.get()
    if chosen is KernelBackend.TRITON:
        _require_possible(tensor)
    if chosen is not None:
        return chosen
    if not tensor.is_cuda or tensor.dtype not in KERNEL_DTYPES or not has_triton():
        return KernelBackend.TORCH
    if isinstance(tensor, FakeTensor) or torch.compiler.is_compiling():
        return KernelBackend.TORCH
    return KernelBackend.TRITON


def backend_for_rows(x: Tensor) -> KernelBackend:
    """Return the backend of a kernel that holds whole rows of x (..., n)."""
    return KernelBackend.TORCH if x.shape[-1] > LONGEST_ROW else backend_for(x)


def has_cpu_data(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a CPU tensor with data and ``using`` requests no backend.

    An operation that computes an activation again in its backward saves memory, not time, on a CPU.
    """
    fake = isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()
    return tensor.device.type == "cpu" and not fake and _CHOSEN.get() is None


def run(backend: KernelBackend, module: str, twin: Callable[..., Any], *args: Any) -> Any:
    """Call ``twin`` with ``args``, or the function of its name in ``triton_code.<module>``."""
    if backend is KernelBackend.TRITON:
        code = import_module(f"dlo_lib.kernels.triton_code.{module}")
        return getattr(code, twin.__name__)(*args)
    with _AROUND.get()():
        return twin(*args)


@contextlib.contextmanager
def around_twins(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter ``context()`` around each call of a twin inside the context.

    A twin represents its kernel where Triton cannot compute, such as on fake tensors. It stores temporary
    tensors that the kernel keeps in registers, so a measurement of memory takes the call as one operation.
    """
    before = _AROUND.set(context)
    try:
        yield
    finally:
        _AROUND.reset(before)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a twin computes what it receives in ``dtype``: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _require_possible(tensor: Tensor) -> None:
    if tensor.dtype not in KERNEL_DTYPES:
        names = ", ".join(_name(dtype) for dtype in KERNEL_DTYPES)
        raise UserError(f"Triton kernels compute {names}, not {_name(tensor.dtype)}: use KernelBackend.TORCH")
    if tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "Triton kernels need a CUDA tensor: set TRITON_INTERPRET=1 before the first call to"
            " interpret them on the CPU, or use KernelBackend.TORCH"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_floating(name: str, tensor: Tensor) -> None:
    """Check that ``tensor`` holds real floating-point numbers.

    Raises:
        UserError: it does not.
    """
    if not tensor.is_floating_point():
        raise UserError(f"{name} is {_name(tensor.dtype)}: it should be a floating-point tensor")


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], because: str) -> None:
    """Check that ``tensor`` has the given shape; ``because`` says where the shape comes from.

    Raises:
        UserError: it has another one.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(f"{name} has shape {tuple(tensor.shape)}: it should be {tuple(shape)}, {because}")


def require_same(names: str, *tensors: Tensor) -> None:
    """Check that all tensors have one shape, one dtype and one device; ``names`` are their names.

    Raises:
        UserError: they do not.
    """
    for what in ("shape", "dtype", "device"):
        values = [getattr(tensor, what) for tensor in tensors]
        if any(value != values[0] for value in values):
            shown = (tuple(value) if what == "shape" else value for value in values)
            listed = " and ".join(str(value).removeprefix("torch.") for value in shown)
            raise UserError(f"{names} have {what} {listed}: they should have the same {what}")


def require_rows(name: str, tensor: Tensor) -> None:
    """Check that ``tensor`` is a floating-point tensor with a last dimension.

    Raises:
        UserError: it is not.
    """
    require_floating(name, tensor)
    if tensor.ndim == 0:
        raise UserError(f"{name} is a scalar: it should have at least one dimension")
