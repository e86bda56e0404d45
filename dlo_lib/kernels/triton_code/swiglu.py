"""Kernels of ``dlo_lib.kernels.swiglu``. A program computes a block of consecutive elements.

The backward does not write over its inputs. Autograd may give the gradient of the output to other operations
as well, and the gate and the up projection, which are saved, belong to the caller and are read again if the
graph is kept. It would save memory, but no traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.rows import flat


@triton.jit
def _forward_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    gate_at, up_at, out_at = gate_ptr + start + offsets, up_ptr + start + offsets, out_ptr + start + offsets
    if start + BLOCK <= n:  # a whole block needs no mask
        gate, up = tl.load(gate_at).to(tl.float32), tl.load(up_at).to(tl.float32)
        tl.store(out_at, gate * tl.sigmoid(gate) * up)
    else:
        mask = start + offsets < n
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_at, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _gradients(grad, gate, up):
    grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    return grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), grad * gate * sigmoid


@triton.jit
def _backward_kernel(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    grad_at, gate_at, up_at = grad_ptr + start + offsets, gate_ptr + start + offsets, up_ptr + start + offsets
    grad_gate_at, grad_up_at = grad_gate_ptr + start + offsets, grad_up_ptr + start + offsets
    if start + BLOCK <= n:
        grad_gate, grad_up = _gradients(tl.load(grad_at), tl.load(gate_at), tl.load(up_at))
        tl.store(grad_gate_at, grad_gate)
        tl.store(grad_up_at, grad_up)
    else:
        mask = start + offsets < n
        grad = tl.load(grad_at, mask=mask, other=0.0)
        gate = tl.load(gate_at, mask=mask, other=0.0)
        grad_gate, grad_up = _gradients(grad, gate, tl.load(up_at, mask=mask, other=0.0))
        tl.store(grad_gate_at, grad_gate, mask=mask)
        tl.store(grad_up_at, grad_up, mask=mask)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    flat("swiglu.forward", _forward_kernel, gate.device, gate.dtype, gate.numel())(gate, up, out)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    start = flat("swiglu.backward", _backward_kernel, gate.device, gate.dtype, gate.numel())
    start(grad, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up
