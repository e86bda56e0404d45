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
from torch.autograd.function import once_differentiable

from dlo_lib.kernels.dispatch import KernelBackend, backend_for, require_floating, require_same


def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y; both have one shape (any), one floating-point dtype and one device.

    Raises:
        UserError: the tensors differ in shape, dtype or device, or are not floating-point.
    """
    require_floating("x", x)
    require_same("x and y", x, y)
    return x + y if backend_for(x) is KernelBackend.TORCH else _VectorAdd.apply(x, y)


class _VectorAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        from dlo_lib.kernels.triton_code.vector_add import add

        return add(x, y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
