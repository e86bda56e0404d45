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
from torch.autograd.function import once_differentiable

from dlo_lib.kernels.dispatch import KernelBackend, backend_for, require_rows


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of ``x`` (..., n) over its last dimension, in the dtype of ``x``.

    The sums are fp32 or wider. A row of which every element is -inf becomes NaN, as in PyTorch.

    Raises:
        UserError: ``x`` is a scalar or not floating-point.
    """
    require_rows("x", x)
    return softmax_twin(x) if backend_for(x) is KernelBackend.TORCH else _Softmax.apply(x)


def softmax_twin(x: Tensor) -> Tensor:
    """Compute the softmax in PyTorch."""
    return torch.softmax(x, dim=-1)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from dlo_lib.kernels.triton_code.softmax import softmax_forward

        y = softmax_forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from dlo_lib.kernels.triton_code.softmax import softmax_backward

        (y,) = ctx.saved_tensors
        return softmax_backward(grad, y)
