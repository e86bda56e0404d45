"""SwiGLU's product: one kernel for silu(gate) * up, with the activation recomputed in the backward.

    y = silu(g) u,  silu(g) = g s(g),  s(g) = 1 / (1 + exp(-g))
    du = dy silu(g)        dg = dy u s(g) (1 + g (1 - s(g)))

Autograd of the two operators saves g, u and silu(g); this function saves g and u. In Llama 3.2 3B with 2048
tokens in bf16 a block saves 32 MiB less.

Paper: GLU variants improve Transformer (arXiv:2002.05202).
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
    backend_for,
    is_recorded,
    once_differentiable,
    require_floating,
    require_same,
    run,
    uses_operators,
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; both have one shape (any), one floating-point dtype and one device.

    On a CPU, autograd saves silu(gate), because computing it again is slower.

    Raises:
        UserError: the tensors differ in shape, dtype or device, or are not floating-point.
    """
    require_floating("gate", gate)
    require_same("gate and up", gate, up)
    if uses_operators("swiglu", gate):
        return F.silu(gate) * up
    backend = backend_for(gate)
    if is_recorded(gate, up):
        return apply(_SwiGLU, gate, up, backend)
    return run(backend, "swiglu", swiglu_forward, gate, up)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the product in PyTorch."""
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up in PyTorch."""
    grad_up = F.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad * up, gate), grad_up


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, backend: KernelBackend) -> Tensor:
        ctx.backend = backend
        ctx.save_for_backward(gate, up)
        return run(backend, "swiglu", swiglu_forward, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return *run(ctx.backend, "swiglu", swiglu_backward, grad, gate, up), None
