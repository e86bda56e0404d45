"""Kernel of ``dlo_lib.kernels.adamw``. Programs with the same second number share a parameter, which they
find in a table of addresses, and take its blocks in turns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.kernels.triton_code.launch import launch, programs_at_once

BLOCK = 1024


@triton.jit
def _adamw_kernel(
    param_like, grad_like, table_ptr, corrections_ptr, decay, lr, weight1, weight2, eps, BLOCK: tl.constexpr
):
    # A row of the table: the addresses of parameter, gradient and moments, and the number of elements.
    row = table_ptr + tl.program_id(1) * 5
    param_ptr = tl.load(row).to(param_like.dtype)
    grad_ptr = tl.load(row + 1).to(grad_like.dtype)
    exp_avg_ptr = tl.load(row + 2).to(param_like.dtype)
    exp_avg_sq_ptr = tl.load(row + 3).to(param_like.dtype)
    size = tl.load(row + 4)
    correction1 = tl.load(corrections_ptr + tl.program_id(1) * 2)
    correction2 = tl.load(corrections_ptr + tl.program_id(1) * 2 + 1)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, size, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        param = tl.load(param_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        exp_avg += weight1 * (grad - exp_avg)
        exp_avg_sq += weight2 * (grad * grad - exp_avg_sq)
        deviation = tl.sqrt(exp_avg_sq / correction2) + eps
        param = param * decay - lr / correction1 * exp_avg / deviation
        tl.store(param_ptr + offsets, param, mask=mask)
        tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)


def adamw_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update dense parameters and their moments in place. All parameters have one dtype, all gradients one.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: tensors of one shape and one layout at one position of the
            lists.
        steps: for each parameter the number of its step, () fp32 on the device of the parameters. They
            differ if some parameters had no gradient in earlier steps. The host does not wait for them.
    """
    device = params[0].device
    # In fp64, because 1 - beta2 ** step loses most digits in fp32.
    done = torch.stack(steps).double()
    corrections = torch.stack([1 - beta1**done, 1 - beta2**done], dim=1).float()  # (parameters, 2)
    rows = [
        [*(tensor.data_ptr() for tensor in tensors), tensors[0].numel()]
        for tensors in zip(params, grads, exp_avgs, exp_avg_sqs)
    ]
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    blocks = triton.cdiv(max(param.numel() for param in params), BLOCK)
    launch(
        _adamw_kernel, (min(blocks, programs_at_once(device)), len(params)),
        params[0], grads[0], table.to(device, non_blocking=True), corrections, 1 - lr * weight_decay, lr,
        1 - beta1, 1 - beta2, eps, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
