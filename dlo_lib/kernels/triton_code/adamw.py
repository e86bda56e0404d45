"""Kernel of ``dlo_lib.kernels.adamw``. A program updates one chunk of one parameter: two tables on the device
say which chunk, and where the tensors of the parameter are.

The host neither waits for the device nor reads the step, the loss scale or the overflow flag.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.triton_code.launch import launch
from dlo_lib.kernels.triton_code.tuning import tuned

COLUMNS = 6
"""Of the table of addresses: parameter, gradient, both moments, the step, and the number of elements."""


@triton.jit
def _correction(step, log_beta):
    """Return 1 - beta ** step. The difference loses most digits in fp32, so it is a series where it is
    small."""
    x = step * log_beta
    series = 1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0 * (1.0 + x / 9.0)))
    series = 1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * series)))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _update(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, offsets, mask, inverse_scale, decay, step_size,
    root2, weight1, weight2, eps, SCALED: tl.constexpr,
):  # fmt: skip
    param = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask).to(tl.float32)
    if SCALED:
        grad *= inverse_scale
        tl.store(grad_ptr + offsets, grad, mask=mask)
    exp_avg += weight1 * (grad - exp_avg)
    exp_avg_sq += weight2 * (grad * grad - exp_avg_sq)
    param = param * decay - step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root2 + eps)
    tl.store(param_ptr + offsets, param, mask=mask)
    tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)


@triton.jit
def _adamw_kernel(
    param_like, grad_like, step_like, chunks_ptr, table_ptr, scale_ptr, found_ptr, decay, lr, log_beta1,
    log_beta2, weight1, weight2, eps, SCALED: tl.constexpr, CHECKED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    found = 0.0
    if CHECKED:
        found = tl.load(found_ptr)
    if found == 0.0:
        entry = chunks_ptr + tl.program_id(0).to(tl.int64) * 2
        row = table_ptr + tl.load(entry) * 6
        first = tl.load(entry + 1).to(tl.int64) * CHUNK
        param_ptr = tl.load(row).to(param_like.dtype)
        grad_ptr = tl.load(row + 1).to(grad_like.dtype)
        exp_avg_ptr = tl.load(row + 2).to(param_like.dtype)
        exp_avg_sq_ptr = tl.load(row + 3).to(param_like.dtype)
        step = tl.load(tl.load(row + 4).to(step_like.dtype)) + 1.0
        size = tl.load(row + 5)
        if ALIGNED:  # loads and stores of 16 bytes
            param_ptr = tl.multiple_of(param_ptr, 16)
            grad_ptr = tl.multiple_of(grad_ptr, 16)
            exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 16)
            exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr, 16)
        inverse_scale = 1.0
        if SCALED:
            inverse_scale = 1.0 / tl.load(scale_ptr)
        step_size = lr / _correction(step, log_beta1)
        root2 = 1.0 / tl.sqrt(_correction(step, log_beta2))
        if first + CHUNK <= size:  # without masks
            for done in range(0, CHUNK, BLOCK):
                _update(
                    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, first + done + tl.arange(0, BLOCK),
                    None, inverse_scale, decay, step_size, root2, weight1, weight2, eps, SCALED,
                )  # fmt: skip
        else:
            for start in range(first, size, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                _update(
                    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, offsets, offsets < size, inverse_scale,
                    decay, step_size, root2, weight1, weight2, eps, SCALED,
                )  # fmt: skip


class Tables:
    """The tables of the parameters of one kernel, kept on the device as long as they are unchanged."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._chunk = 0
        self._addresses: list[int] = []
        self.programs = 0
        self.aligned = True
        self.chunks: Tensor | None = None
        """(programs, 2) int32: the number of the parameter, and of the chunk in it."""
        self.addresses: Tensor | None = None
        """(parameters, COLUMNS) int64."""

    def fill(self, lists: list[list[Tensor]], chunk: int) -> None:
        """Update the tables for the tensors of ``lists``, which are those of ``COLUMNS`` in its order, and
        for programs that update ``chunk`` elements. This compares addresses; it does not wait for the
        device."""
        device = lists[0][0].device
        sizes = [param.numel() for param in lists[0]]
        if sizes != self._sizes or chunk != self._chunk or self.chunks is None:
            with torch.device("cpu"):
                counts = torch.tensor([-(-size // chunk) for size in sizes])
                number = torch.repeat_interleave(torch.arange(len(sizes)), counts)
                first = (counts.cumsum(0) - counts)[number]
                table = torch.stack([number, torch.arange(len(number)) - first], dim=1).int()
            self.programs, self.chunks = len(number), table.to(device)
            self._sizes, self._chunk, self._addresses = sizes, chunk, []
        columns = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
        columns.append(sizes)
        addresses = list(chain.from_iterable(columns))
        if addresses != self._addresses or self.addresses is None:
            for step in lists[4]:
                if step.dtype is not torch.float32 or step.device != device:
                    raise UserError(
                        f"the step of a parameter is {step.dtype} on {step.device}: "
                        f"it should be fp32 on {device}, as load_state_dict makes it"
                    )
            pinned = device.type == "cuda"
            rows = torch.tensor(list(zip(*columns)), dtype=torch.int64, device="cpu", pin_memory=pinned)
            self.addresses = rows.to(device, non_blocking=True)
            self._addresses = addresses
            self.aligned = all(not address & 15 for column in columns[:4] for address in column)


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
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    tables: Tables | None = None,
) -> None:
    """Update dense parameters and their moments in place, and add 1 to their steps.

    All parameters have one dtype and device, and all gradients one dtype.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: tensors of one shape and one layout at one position of the
            lists.
        steps: for each parameter the number of steps before this one, () fp32 on the device of the
            parameters. They differ if some parameters had no gradient in earlier steps.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``.
        grad_scale: one element, fp32 on the device: the gradients are divided by it, in place.
        found_inf: one element, fp32 on the device: if it is not 0, nothing changes, the steps included.
        tables: those of the last update of the same parameters, which save their upload.
    """
    device = params[0].device
    tables = Tables() if tables is None else tables
    options: dict[str, Any] = tuned("adamw", device)
    tables.fill([params, grads, exp_avgs, exp_avg_sqs, steps], options["CHUNK"])
    launch(
        _adamw_kernel, (tables.programs,),
        params[0], grads[0], steps[0], tables.chunks, tables.addresses,
        steps[0] if grad_scale is None else grad_scale, steps[0] if found_inf is None else found_inf,
        1 - lr * weight_decay, lr, _log(beta1), _log(beta2), 1 - beta1, 1 - beta2, eps,
        SCALED=grad_scale is not None, CHECKED=found_inf is not None, ALIGNED=tables.aligned, **options,
    )  # fmt: skip
    if found_inf is None:
        torch._foreach_add_(steps, 1)
    else:
        torch._foreach_add_(steps, [(found_inf == 0).to(steps[0].dtype).reshape(())] * len(steps))


def _log(beta: float) -> float:
    """Return log(beta); for 0, whose power is 0 from step 1 on, a number whose exponential is 0."""
    return math.log(beta) if beta > 0 else -1e4
