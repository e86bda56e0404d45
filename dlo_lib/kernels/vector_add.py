"""Vector addition: the smallest kernel, which shows the form of this room.

    z = x + y

A program of the Triton kernel adds one block of consecutive elements; a mask excludes the elements after the
end. The sum reads two tensors and writes one, so its time is that of the memory traffic: 3 * numel * element
size bytes. There is nothing to save by fusion in a single sum, and nothing is kept for the backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for,
    is_recorded,
    kernel,
    once_differentiable,
    require_floating,
    require_same,
    uses_operators,
)


def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y; both have one shape (any), one floating-point dtype and one device.

    Raises:
        UserError: the tensors differ in shape, dtype or device, or are not floating-point.
    """
    require_floating("x", x)
    require_same("x and y", x, y)
    if uses_operators("vector_add", x) or backend_for(x) is KernelBackend.TORCH:
        return x + y
    return apply(_VectorAdd, x, y) if is_recorded(x, y) else kernel("vector_add", "add")(x, y)


class _VectorAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return kernel("vector_add", "add")(x, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
