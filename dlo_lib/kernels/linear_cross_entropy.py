"""Cross-entropy of a linear layer that stores the logits of one chunk of rows at a time.

    logits = x W^T        loss = cross-entropy(logits, targets)
    dx = dlogits W        dW = dlogits^T x

The logits of N rows are N * V numbers: 2.1 GB in bf16 for 8192 tokens of Llama 3 (V = 128,256), 4.2 GB in
fp32, and their gradient the same. Here the forward takes a chunk of rows at a time: it computes their logits,
their losses, overwrites the logits with their gradient, and adds its products to dx and dW. The backward
multiplies dx and dW by the gradient of the loss, which is one number.

Rows are cheap and chunks are not: the product of a chunk with C rows reads and writes dW, 8 bytes for 2 C
operations of each element. On an H200, products that add to dW reach 284 TFLOP/s with C = 512, 626 with 2048
and 670 with 3072, as much as the product alone. A chunk therefore has up to 3072 rows, or half as many as x
has columns if that is more. Memory beyond the arguments: the logits of a chunk, dx, and dW in fp32, which is
also the gradient if W is fp32.

If one chunk is enough, dW is not stored twice: the forward keeps the gradient of the logits, and the backward
multiplies x by the gradient of the loss before it computes dW. With fp16, where this product might
underflow, it is computed as that of several chunks.

The gradients in the forward are those of the *sum*, without 1 / N, so that they do not underflow in fp16. dW
is summed in fp32 if W is narrower. Without gradients (``torch.no_grad``) only the losses are computed.

Papers: Liger-Kernel (arXiv:2410.10989), section 3.2; Cut your losses (arXiv:2411.09009), which also avoids
dW.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn import functional as F

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.kernels.cross_entropy import (
    cross_entropy,
    logits_gradient,
    reduced,
    require_targets,
    row_losses,
    valid_rows,
)
from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms, LossReduction
from dlo_lib.kernels.dispatch import (
    OPERATORS,
    KernelBackend,
    apply,
    backend_for,
    computed_in,
    has_cpu_data,
    is_recorded,
    once_differentiable,
    require_floating,
    run,
)

CHUNK_ROWS = 3072
"""The fewest rows of a chunk that is chosen here, because a product of fewer rows reads and writes dW for too
little work."""
ROWS_OF_A_TILE = 128
"""The rows of a chunk are a multiple of this, which fills the tiles of a product."""


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
        chunk_rows: the most rows of a chunk; None: 3072, or hidden / 2 if that is more. On a CPU, None stores
            all logits, because chunks need 1.3 to 2.4 times the time there.

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
    dtype = _dtype_of_products(x)
    if chunk_rows is None and has_cpu_data(x) and dtype == computed_in(dtype):
        cast = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        return cross_entropy(
            F.linear(x, cast),
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
        )
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    flat = targets if targets.ndim == 1 else targets.reshape(-1)
    # On a CPU all logits are one chunk. In 16 bits, autograd of two operators would round the gradient of the
    # loss with that of the logits: where the target is unlikely, all these are about -1 times this number.
    most = max(1, rows.shape[0]) if has_cpu_data(x) else _rows_of_a_chunk(rows.shape[0], rows.shape[1])
    chunk = chunk_rows or most
    mean = reduction is LossReduction.MEAN
    if torch.compiler.is_compiling():
        total = OPERATORS["linear_losses"](rows, weight, flat, terms, chunk)
        return total / valid_rows(targets, terms) if mean else total
    backend = backend_for(x)
    if is_recorded(rows, weight):
        return apply(_LinearCrossEntropy, rows, weight, flat, terms, mean, chunk, backend)
    with _without_autocast(x):
        losses = chunk_losses(rows.to(dtype), weight.to(dtype), flat, terms, chunk, None, None, backend)
    return reduced(losses, flat, terms, mean, backend)[0]


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype of autocast, or that of x. The meta device has no autocast."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _rows_of_a_chunk(rows: int, hidden: int) -> int:
    """Return the rows of chunks of equal size, of which the last may be smaller."""
    most = max(CHUNK_ROWS, hidden // 2)
    equal = -(-rows // max(1, -(-rows // most)))
    return max(ROWS_OF_A_TILE, -(-equal // ROWS_OF_A_TILE) * ROWS_OF_A_TILE)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        terms: CrossEntropyTerms,
        mean: bool,
        chunk: int,
        backend: KernelBackend,
    ) -> Tensor:
        dtype = _dtype_of_products(x)
        narrow, w = x.to(dtype).contiguous(), weight.to(dtype)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.backend, ctx.dtypes = backend, (x.dtype, weight.dtype)
        # The backward multiplies x by the gradient of the loss, which may be too small a number for fp16.
        ctx.is_one_chunk = 0 < x.shape[0] <= chunk and w.numel() > 0 and dtype is not torch.float16
        with _without_autocast(x):
            if ctx.is_one_chunk:
                logits = narrow @ w.T
                losses = torch.empty(x.shape[0], dtype=computed_in(dtype), device=x.device)
                run(backend, "loss_and_gradient", loss_and_gradient, logits, targets, terms, losses)
                kept: tuple[Tensor | None, ...] = (logits, narrow, w)
            else:
                kept = gradient_buffers(x, weight, needs_x, needs_w)
                losses = chunk_losses(narrow, w, targets, terms, chunk, *kept, backend)
        total, count = reduced(losses, targets, terms, mean, backend)
        ctx.save_for_backward(count, *kept)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        x_dtype, w_dtype = ctx.dtypes
        count, *kept = ctx.saved_tensors
        if count is not None:
            scale = scale / count

        def times_scale(grad: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
            out = grad if in_place and grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
            result: Tensor = run(ctx.backend, "loss_and_gradient", scaled, grad, scale, out)
            return result

        grad_x = grad_w = None
        if ctx.is_one_chunk:
            logits, x, w = kept
            with _without_autocast(x):
                if needs_x:
                    grad_x = torch.empty_like(x, dtype=x_dtype)
                    product(logits, w, grad_x)
                    grad_x = times_scale(grad_x, x_dtype, in_place=True)
                if needs_w:
                    grad_w = torch.empty(w.shape, dtype=w_dtype, device=w.device)
                    product(logits.T, times_scale(x, x.dtype, in_place=False), grad_w)
        else:
            # A graph that is freed after this does not read its gradients again: they are scaled in place.
            in_place = not _graph_is_kept()
            grad_x, grad_w = kept
            grad_x = None if grad_x is None else times_scale(grad_x, x_dtype, in_place)
            grad_w = None if grad_w is None else times_scale(grad_w, w_dtype, in_place)
        return grad_x, grad_w, None, None, None, None, None


def gradient_buffers(
    x: Tensor, weight: Tensor, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return tensors for the gradients that are needed, that of the weight in fp32 or wider. They are zero
    where no chunk writes them."""
    make = torch.empty if x.shape[0] and weight.numel() else torch.zeros
    grad_x = make(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
    wide = computed_in(weight.dtype)
    return grad_x, make(weight.shape, dtype=wide, device=x.device) if needs_w else None


def chunk_losses(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    terms: CrossEntropyTerms,
    chunk: int,
    grad_x: Tensor | None,
    grad_w: Tensor | None,
    backend: KernelBackend,
) -> Tensor:
    """Return the losses of all rows of x, (rows,), and write the gradients of their sum, chunk after
    chunk."""
    losses = torch.zeros(x.shape[0], dtype=computed_in(x.dtype), device=x.device)
    for first in range(0, x.shape[0], chunk) if w.numel() else ():
        part = slice(first, first + chunk)
        logits = x[part] @ w.T
        if grad_x is None and grad_w is None:
            losses[part] = run(backend, "cross_entropy", row_losses, logits, targets[part], terms)[0]
            continue
        run(backend, "loss_and_gradient", loss_and_gradient, logits, targets[part], terms, losses[part])
        if grad_x is not None:
            product(logits, w, grad_x[part])
        if grad_w is not None:
            product(logits.T, x[part], grad_w, add=first > 0)
        del logits  # before the next one is allocated
    return losses


def _graph_is_kept() -> bool:
    """Return whether the graph of the backward that runs now is kept (``retain_graph``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def loss_and_gradient(logits: Tensor, targets: Tensor, terms: CrossEntropyTerms, losses: Tensor) -> None:
    """Compute the ``losses`` (rows,) in PyTorch, and overwrite ``logits`` (rows, vocab) with the gradient of
    their sum."""
    found, lse = row_losses(logits, targets, terms)
    losses.copy_(found)
    logits_gradient(torch.ones_like(lse), logits, targets, lse, terms, logits)


def scaled(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Compute ``x * scale`` in PyTorch, in fp32 or wider, and return it in ``out``, which may be ``x``."""
    return torch.mul(x.to(computed_in(x.dtype)), scale, out=out)


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write ``a @ b`` to ``out``, or add it. The sum is that of the dtype of ``out``, which may be fp32 where
    ``a`` and ``b`` are narrower; a GPU computes this in the product."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif _has_wide_products(a, out):
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        run(KernelBackend.TORCH, "", _narrow_product, a, b, out, add)


def _has_wide_products(a: Tensor, out: Tensor) -> bool:
    """Return whether cuBLAS adds the products of two narrow matrices to one in fp32. Before 2.11, PyTorch
    required a narrow matrix there, and until then it cannot be traced."""
    if not a.is_cuda or out.dtype is not torch.float32 or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    return RELEASE >= (2, 11) and not isinstance(a, FakeTensor)


def _narrow_product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """The product in the dtype of ``a``; a tensor of its size is allocated."""
    out.add_(a @ b) if add else out.copy_(a @ b)
