"""RMSNorm in one pass, with the input and one number of each row saved for the backward.

    r = 1 / sqrt(mean(x^2) + eps)        xhat = x r        y = xhat w
    dx = r (dy w - xhat mean(dy w xhat))              dw = sum over rows of dy xhat

Written as separate operators on a bf16 input, autograd saves an fp32 copy of the input, the normed input
and r: 10 bytes of each element. This function saves x itself, which the caller usually has anyway, and r.
The kernel of the backward computes several rows in each program and keeps its part of dw in registers; the
parts, one row for each program, are summed afterwards.

Paper: Root mean square layer normalization (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for_rows,
    computed_in,
    is_recorded,
    once_differentiable,
    require_floating,
    require_rows,
    require_shape,
    run,
    uses_operators,
)
from dlo_lib.models.llama import rms_norm as by_operators


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x / rms(x) * weight over the last dimension.

    Args:
        x: (..., n), floating-point.
        weight: (n,), floating-point.
        eps: added to the mean of the squares.

    Returns:
        (..., n) in the wider dtype of ``x`` and ``weight``. x / rms(x) is computed in fp32 or wider and
        rounded to the dtype of ``x``, as in Llama.

    Raises:
        UserError: the shapes do not fit, or a tensor is not floating-point.
    """
    require_rows("x", x)
    require_floating("weight", weight)
    require_shape("weight", weight, (x.shape[-1],), "the last dimension of x")
    if uses_operators("rms_norm", x):
        return by_operators(x, weight, eps)
    backend = backend_for_rows(x)
    if is_recorded(x, weight):
        return apply(_RMSNorm, x, weight, eps, backend)
    return run(backend, "norms", rms_norm_forward, x, weight, eps)[0]


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the output and r (..., 1) in PyTorch."""
    wide = computed_in(x.dtype)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    r = (norm.square_().div_(x.shape[-1])).add_(eps).rsqrt_()
    normed = (x * r).to(x.dtype)
    return (normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight), r


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the weight in PyTorch."""
    wide = r.dtype
    normed = x * r
    products = grad * normed
    grad_weight = products.reshape(-1, x.shape[-1]).sum(0)
    mean = (products @ weight.to(wide)).unsqueeze(-1).div_(x.shape[-1])
    grad_x = normed.mul_(mean.mul_(-r))
    grad_x.addcmul_(torch.mul(grad, weight, out=products if grad.dtype == weight.dtype == wide else None), r)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, backend: KernelBackend) -> Tensor:
        ctx.backend = backend
        y, r = run(backend, "norms", rms_norm_forward, x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        return *run(ctx.backend, "norms", rms_norm_backward, grad, x, weight, r), None, None
