"""Cross-entropy of a linear layer whose logits are never stored: chunk after chunk of rows.

    logits = x W^T        loss = cross-entropy(logits, targets)
    dx = dlogits W        dW = dlogits^T x

The logits of N rows are N * V numbers: 0.5 GB in bf16 for 2048 tokens of Llama 3 (V = 128,256), 1.0 GB in
fp32, and their gradient the same. Here the forward takes a few rows at a time: it computes their logits,
their losses, overwrites the logits with their gradient, and adds its products to dx and dW. The backward
multiplies dx and dW by the gradient of the loss, which is one number. The products are those of the usual
form; what is stored is dx, dW, and the logits of one chunk, which are at most as large as x.

The gradients in the forward are those of the *sum*, without 1 / N, so that they do not underflow in fp16. dW
is summed in fp32 if W is narrower. Without gradients (``torch.no_grad``) only the losses are computed.

Papers: Liger-Kernel (arXiv:2410.10989), section 3.2; Cut your losses (arXiv:2411.09009), which also avoids
dW.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.errors import UserError, require_count
from dlo_lib.kernels.cross_entropy import (
    cross_entropy,
    logits_gradient,
    require_targets,
    row_losses,
    valid_rows,
)
from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms, LossReduction
from dlo_lib.kernels.dispatch import (
    KernelBackend,
    backend_for,
    computed_in,
    has_cpu_data,
    require_floating,
    run,
)

LEAST_ROWS = 128
"""The fewest rows of a chunk that is chosen here, because a product of fewer rows reads W for too little
work."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: LossReduction = LossReduction.MEAN,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the cross-entropy of the logits ``x @ weight.T``, () in fp32 or wider.

    Args:
        x: (..., hidden), floating-point.
        weight: (vocab, hidden), floating-point. Inside autocast the products have its dtype, else that of
            ``x``.
        targets: (...) int64, in [0, vocab) or ``ignore_index``.
        ignore_index, label_smoothing, z_loss, reduction: as for ``cross_entropy``.
        chunk_rows: the rows of a chunk; None: as many as make its logits as large as ``x``, at least 128. On
            a CPU, None stores all logits, because chunks need 1.3 to 2.4 times the time there.

    Raises:
        UserError: the shapes or dtypes do not fit, or an argument is out of range.
    """
    terms = CrossEntropyTerms(ignore_index, label_smoothing, z_loss)
    require_floating("x", x)
    require_floating("weight", weight)
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise UserError(
            f"x and weight have shape {tuple(x.shape)} and {tuple(weight.shape)}: "
            "they should be (..., hidden) and (vocab, hidden)"
        )
    require_targets(targets, tuple(x.shape[:-1]), weight.shape[0], terms, "that of x without hidden")
    if chunk_rows is not None:
        require_count("chunk_rows", chunk_rows)
    if chunk_rows is None and has_cpu_data(x):
        cast = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        return cross_entropy(
            F.linear(x, cast),
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
        )
    rows = x.reshape(-1, x.shape[-1])
    needs = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunk = chunk_rows or max(LEAST_ROWS, rows.numel() // max(weight.shape[0], 1))
    total = _LinearCrossEntropy.apply(rows, weight, targets.reshape(-1), terms, chunk, needs, backend_for(x))
    return total if reduction is LossReduction.SUM else total / valid_rows(targets, terms)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        terms: CrossEntropyTerms,
        chunk: int,
        needs: bool,
        backend: KernelBackend,
    ) -> Tensor:
        kind = x.device.type
        # The meta device, on which launches are recorded, has no autocast.
        known = torch.amp.is_autocast_available(kind)
        dtype = torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else x.dtype
        narrow, w = x.to(dtype), weight.to(dtype)
        total = torch.zeros((), dtype=computed_in(dtype), device=x.device)
        grad_x = torch.empty_like(x) if needs and ctx.needs_input_grad[0] else None
        wide = computed_in(weight.dtype)
        grad_w = torch.zeros_like(weight, dtype=wide) if needs and ctx.needs_input_grad[1] else None
        with torch.autocast(kind, enabled=False) if known else contextlib.nullcontext():
            for rows in range(0, x.shape[0], chunk) if w.numel() else ():
                part = slice(rows, rows + chunk)
                total += _chunk(narrow[part], w, targets[part], terms, grad_x, grad_w, part, backend)
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_w is None else grad_w * scale.to(grad_w.dtype),
            *[None] * 5,
        )


def _chunk(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    terms: CrossEntropyTerms,
    grad_x: Tensor | None,
    grad_w: Tensor | None,
    part: slice,
    backend: KernelBackend,
) -> Tensor:
    """Return the sum of the losses of the rows ``part``; write their gradient and add that of the weight."""
    logits = x @ w.T  # (chunk, vocab)
    losses, lse = run(backend, "cross_entropy", row_losses, logits, targets, terms)
    if grad_x is not None or grad_w is not None:
        of_rows = torch.ones_like(lse)
        grad = run(backend, "cross_entropy", logits_gradient, of_rows, logits, targets, lse, terms, logits)
        if grad_x is not None:
            if grad_x.dtype == grad.dtype:
                torch.mm(grad, w, out=grad_x[part])
            else:
                grad_x[part] = grad @ w
        if grad_w is not None:
            if grad_w.dtype == grad.dtype:
                grad_w.addmm_(grad.T, x)
            else:
                grad_w += grad.T @ x
    return losses.sum()
