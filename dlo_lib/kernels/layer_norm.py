"""LayerNorm in one pass, with the input, the mean and the inverse deviation of each row saved.

    xhat = (x - mean(x)) r        r = 1 / sqrt(var(x) + eps)        y = xhat w + b
    dx = r (g - mean(g) - xhat mean(g xhat)),  g = dy w        dw = sum of dy xhat        db = sum of dy

PyTorch has a fused operator for it on every device, which is the twin here. The Triton kernel differs from
that of RMSNorm by the mean and the bias.

Paper: Layer normalization (arXiv:1607.06450).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for_rows,
    is_recorded,
    kernel,
    once_differentiable,
    require_rows,
    require_same,
    require_shape,
    uses_operators,
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the normed rows of ``x``, times ``weight`` plus ``bias``.

    Args:
        x: (..., n), floating-point.
        weight, bias: (n,), both in one floating-point dtype.
        eps: added to the variance.

    Returns:
        (..., n) in the dtype of ``x``.

    Raises:
        UserError: the shapes do not fit, or a tensor is not floating-point.
    """
    require_rows("x", x)
    require_rows("weight", weight)
    require_same("weight and bias", weight, bias)
    require_shape("weight", weight, (x.shape[-1],), "the last dimension of x")
    if uses_operators("layer_norm", x) or backend_for_rows(x) is KernelBackend.TORCH:
        return layer_norm_twin(x, weight, bias, eps)
    if is_recorded(x, weight, bias):
        return apply(_LayerNorm, x, weight, bias, eps)
    return kernel("norms", "layer_norm_forward")(x, weight, bias, eps)[0]


def layer_norm_twin(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Compute the norm in PyTorch."""
    if weight.dtype != x.dtype:  # a mixture that PyTorch computes on some devices only
        wide = torch.promote_types(x.dtype, weight.dtype)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, r = kernel("norms", "layer_norm_forward")(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *kernel("norms", "layer_norm_backward")(grad, *ctx.saved_tensors), None
