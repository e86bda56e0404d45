"""Softmax over the last dimension in one pass over memory.

    y_j = exp(x_j - max x) / sum_k exp(x_k - max x)
    dx_j = y_j (dy_j - sum_k dy_k y_k)

Written as separate operators, the maximum, the difference, the exponential, the sum and the quotient each
read and write the row. The fused kernel reads a row once and writes it once. A row that does not fit into
one block is read twice: the maximum and the sum are computed together, block after block, and rescaled
whenever the maximum grows (online softmax). The output is saved for the backward, the input is not.

Paper: Online normalizer calculation for softmax (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for,
    is_recorded,
    kernel,
    once_differentiable,
    require_rows,
    uses_operators,
)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of ``x`` (..., n) over its last dimension, in the dtype of ``x``.

    The sums are fp32 or wider. A row of which every element is -inf becomes NaN, as in PyTorch.

    Raises:
        UserError: ``x`` is a scalar or not floating-point.
    """
    require_rows("x", x)
    if uses_operators("softmax", x) or backend_for(x) is KernelBackend.TORCH:
        return softmax_twin(x)
    return apply(_Softmax, x) if is_recorded(x) else kernel("softmax", "softmax_forward")(x)


def softmax_twin(x: Tensor) -> Tensor:
    """Compute the softmax in PyTorch."""
    return torch.softmax(x, dim=-1)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = kernel("softmax", "softmax_forward")(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return kernel("softmax", "softmax_backward")(grad, y)
