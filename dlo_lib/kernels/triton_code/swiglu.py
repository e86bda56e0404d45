"""Kernels of ``dlo_lib.kernels.swiglu``. A program computes a block of consecutive elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import launch

BLOCK = 1024


@triton.jit
def _forward_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _backward_kernel(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(grad_up_ptr + offsets, grad * gate * sigmoid, mask=mask)
    tl.store(grad_gate_ptr + offsets, grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), mask=mask)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    launch(
        _forward_kernel,
        (triton.cdiv(gate.numel(), BLOCK),),
        gate,
        up,
        out,
        gate.numel(),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    launch(
        _backward_kernel, (triton.cdiv(gate.numel(), BLOCK),),
        grad, gate, up, grad_gate, grad_up, gate.numel(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return grad_gate, grad_up
