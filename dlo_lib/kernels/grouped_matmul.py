"""Grouped matmul: the product of the rows of each expert with the matrix of that expert, in one kernel.

    out[r] = rows[r] @ weights[e]        for the rows r of expert e, which are consecutive

A loop starts one small product for each expert, most of which leave a GPU partly idle. Here one grid covers
the tiles of all experts. Each program finds its expert and its rows from the counts, which stay on the
device: the host does not wait for the router. The grid has a few programs too many, because the number of
tiles is known on the device only; these end at once. The gradient of the weights is a grouped product as
well, over the rows of each expert.

Paper: MegaBlocks (arXiv:2211.15841), section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for,
    is_recorded,
    once_differentiable,
    require_floating,
    require_shape,
    run,
)


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its expert.

    Args:
        rows: (R, K), floating-point, sorted by expert.
        weights: (experts, K, N) in the dtype of ``rows``.
        counts: (experts,) int64, the number of rows of each expert, on the device of ``rows``. Their sum is
            R. On a GPU it is not checked: rows after the last expert give 0.

    Returns:
        (R, N) in the dtype of ``rows``.

    Raises:
        UserError: the shapes or dtypes do not fit, or, on the CPU, the counts do not.
    """
    require_floating("rows", rows)
    if rows.ndim != 2 or weights.ndim != 3 or weights.shape[1] != rows.shape[1]:
        raise UserError(
            f"rows and weights have shape {tuple(rows.shape)} and {tuple(weights.shape)}: "
            "they should be (R, K) and (experts, K, N)"
        )
    if weights.dtype != rows.dtype:
        raise UserError(f"rows and weights have dtype {rows.dtype} and {weights.dtype}: use the same")
    require_shape("counts", counts, (weights.shape[0],), "one number for each expert")
    if counts.dtype is not torch.int64:
        raise UserError(f"counts is {str(counts.dtype).removeprefix('torch.')}: it should be int64")
    if (
        counts.is_cpu
        and not torch.compiler.is_compiling()
        and ((counts < 0).any() or counts.sum() != rows.shape[0])
    ):
        raise UserError(
            f"counts is {counts.tolist()}: use numbers whose sum is that of the rows, {rows.shape[0]}"
        )
    backend = backend_for(rows)
    if is_recorded(rows, weights):
        return apply(_GroupedMatmul, rows, weights, counts, backend)
    return run(backend, "grouped_matmul", grouped_forward, rows, weights, counts)


def grouped_forward(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Compute the product in PyTorch, expert by expert."""
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    for expert, part in enumerate(_segments(counts)):
        if part.start < part.stop:
            torch.mm(rows[part], weights[expert], out=out[part])
    return out


def grouped_weight_gradient(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """Compute the gradient of the weights (experts, K, N) in PyTorch, expert by expert."""
    out = rows.new_zeros(counts.shape[0], rows.shape[1], grad.shape[1])
    for expert, part in enumerate(_segments(counts)):
        if part.start < part.stop:
            torch.mm(rows[part].T, grad[part], out=out[expert])
    return out


def _segments(counts: Tensor) -> list[slice]:
    ends = counts.cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


class _GroupedMatmul(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Tensor, backend: KernelBackend) -> Tensor:
        ctx.backend = backend
        ctx.save_for_backward(rows, weights, counts)
        return run(backend, "grouped_matmul", grouped_forward, rows, weights, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, counts = ctx.saved_tensors
        code = "grouped_matmul"
        grad_rows = run(ctx.backend, code, grouped_forward, grad, weights.transpose(1, 2), counts)
        return grad_rows, run(ctx.backend, code, grouped_weight_gradient, rows, grad, counts), None, None
