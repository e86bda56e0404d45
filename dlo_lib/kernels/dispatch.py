"""Chooses between a Triton kernel, its PyTorch twin and PyTorch's own operators, and checks the inputs.

The choice is made for each call, from its first tensor:

- a CUDA tensor in fp32, bf16 or fp16: Triton, if it is installed; below ``SMALLEST`` bytes PyTorch's
  operators, because a call of a kernel then costs more than it saves
- a CPU tensor, fp64, a fake tensor: the twin, which saves the same tensors for the backward as the kernel
- in code that ``torch.compile`` traces: PyTorch's operators, which the compiler fuses with their neighbours.
  The operations of ``LIBRARY_WHEN_COMPILING`` become operators of ``kernels.library``, which call the kernel
  or the twin while the compiled code runs.

``using`` overrides the choice, for tests and comparisons.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function, forward_ad

from dlo_lib.base.errors import UserError

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of the Triton kernels, which compute in fp32."""

SMALLEST = {
    "vector_add": 192 << 20,
    "softmax": 48 << 20,
    "rms_norm": 0,
    "layer_norm": 96 << 20,
    "rope": 0,
    "swiglu": 32 << 20,
}
"""The fewest bytes of the first tensor for which the kernel of an operation is used. 0: the kernel is faster
than PyTorch's operators at every size, because it replaces many of them. The others are chosen from times of
``benchmarks.card_launch`` on one GPU (bf16, forward and backward in a loop): below them Python takes longer
than the GPU, and an autograd function takes more of it than an operator. SwiGLU has less than that, because
in training other work hides what Python takes."""

COMPUTED_AGAIN = frozenset({"swiglu"})
"""The operations that compute an activation again in their backward: on a CPU this saves memory, not time."""

LIBRARY_WHEN_COMPILING = frozenset(
    {"cross_entropy", "linear_cross_entropy", "flash_attention", "grouped_matmul"}
)
"""The operations that stay kernels in compiled code, where the compiler has no form that stores as little."""

LONGEST_ROW = 16384
"""The most elements of a row that one program holds at once. The norms hold whole rows."""

LONGEST_FP32_ROW = 8192
"""The most fp32 elements of a row of a norm. PyTorch's operators compute longer ones, because on sm_90,
sm_100 and sm_120 no tile of their backward fits without spilled registers (``kernels.report``)."""


class KernelBackend(enum.Enum):
    """What computes a fused operation."""

    TRITON = "triton"
    TORCH = "torch"


_CHOSEN: ContextVar[KernelBackend | None] = ContextVar("backend of fused kernels", default=None)
_ENTERED: dict[object, KernelBackend] = {}
"""The contexts ``using`` of all threads, in the order in which they were entered."""
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

    The backward of an operation uses the backend of its forward. What a backward inside the context computes
    again (checkpointing) and compiled code use ``backend`` too.

    Raises:
        UserError: Triton is requested and not installed.
    """
    if backend is KernelBackend.TRITON and not has_triton():
        raise UserError("Triton is not installed: pip install 'dlo-lib[kernels]', or use KernelBackend.TORCH")
    before, entry = _CHOSEN.set(backend), object()
    _ENTERED[entry] = backend
    try:
        yield
    finally:
        del _ENTERED[entry]
        _CHOSEN.reset(before)


def _chosen() -> KernelBackend | None:
    """Return the backend that ``using`` requests here. Autograd computes a backward on a GPU in a thread that
    has no context variables: the context entered last is that of its caller."""
    chosen = _CHOSEN.get()
    if chosen is None and _ENTERED and torch._C._current_graph_task_id() != -1:
        return next(reversed(_ENTERED.values()), None)
    return chosen


def is_requested() -> bool:
    """Return whether ``using`` requests a backend here."""
    return _chosen() is not None


def backend_for(tensor: Tensor) -> KernelBackend:
    """Return the backend of a call whose first tensor is ``tensor``. In traced code it is PyTorch: ``run``
    then calls an operator of ``kernels.library``.

    Raises:
        UserError: ``using`` requests Triton for a tensor that it cannot process.
    """
    if torch.compiler.is_compiling():
        return KernelBackend.TORCH
    chosen = _chosen()
    if chosen is KernelBackend.TRITON:
        _require_possible(tensor)
    if chosen is not None:
        return chosen
    if not tensor.is_cuda or tensor.dtype not in KERNEL_DTYPES or not has_triton():
        return KernelBackend.TORCH
    return KernelBackend.TORCH if isinstance(tensor, FakeTensor) else KernelBackend.TRITON


def backend_for_rows(x: Tensor) -> KernelBackend:
    """Return the backend of a kernel that holds whole rows of x (..., n): PyTorch if they are too long."""
    longest = min(LONGEST_ROW, LONGEST_FP32_ROW) if x.dtype is torch.float32 else LONGEST_ROW
    return KernelBackend.TORCH if x.shape[-1] > longest else backend_for(x)


def uses_operators(operation: str, tensor: Tensor) -> bool:
    """Return whether PyTorch's own operators, with autograd's graph of them, compute ``operation``: a key of
    ``SMALLEST`` or ``LIBRARY_WHEN_COMPILING``. ``tensor`` is its first one."""
    if torch.compiler.is_compiling():
        return operation not in LIBRARY_WHEN_COMPILING
    if tensor.is_cuda:
        return tensor.nbytes < SMALLEST.get(operation, 0) and _chosen() is None
    return operation in COMPUTED_AGAIN and has_cpu_data(tensor)


def has_cpu_data(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a CPU tensor with data and ``using`` requests no backend."""
    if torch.compiler.is_compiling():
        return tensor.device.type == "cpu"
    return tensor.is_cpu and not isinstance(tensor, FakeTensor) and _chosen() is None


OPERATORS: dict[str, Callable[..., Any]] = {}
"""The operators of ``kernels.library`` by the names of their twins."""


def run(backend: KernelBackend, module: str, twin: Callable[..., Any], *args: Any) -> Any:
    """Call ``twin`` with ``args``, or the function of its name in ``triton_code.<module>``; in traced code,
    the operator of its name."""
    if backend is KernelBackend.TRITON:
        return kernel(module, twin.__name__)(*args)
    if torch.compiler.is_compiling():
        return OPERATORS[twin.__name__](*args)
    with _AROUND.get()():
        return twin(*args)


@cache
def kernel(module: str, name: str) -> Callable[..., Any]:
    """Return the function ``name`` of ``triton_code.<module>``, which is imported with the first call."""
    function: Callable[..., Any] = getattr(import_module(f"dlo_lib.kernels.triton_code.{module}"), name)
    return function


def apply(function: type[Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, without what only the transforms of ``torch.func`` need."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


def is_recorded(*tensors: Tensor) -> bool:
    """Return whether autograd records an operation of ``tensors``. A ``Function`` that is not recorded only
    costs time. Forward-mode differentiation needs it, because it refuses it."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to differentiate ``backward``, as the decorator of PyTorch does.

    That one enters ``torch.no_grad`` at each call. Here it is called only where autograd records the
    backward.
    """
    recorded: Callable[..., Any] = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Any:
        return recorded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return once


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
    if tensor.shape != shape:
        raise UserError(f"{name} has shape {tuple(tensor.shape)}: it should be {tuple(shape)}, {because}")


def require_same(names: str, *tensors: Tensor) -> None:
    """Check that all tensors have one shape, one dtype and one device; ``names`` are their names.

    Raises:
        UserError: they do not.
    """
    first = tensors[0]
    if all(
        other.shape == first.shape and other.dtype is first.dtype and other.device == first.device
        for other in tensors[1:]
    ):
        return
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
