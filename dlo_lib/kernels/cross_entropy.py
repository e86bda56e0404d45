"""Cross-entropy of logits, with the logits and one number of each row saved for the backward.

For a row x of V logits, its target t, label smoothing a and the factor z of the z-loss:
    lse = log sum_j exp(x_j)
    loss = lse - (1 - a) x_t - a mean(x) + z lse^2
    dx_j = exp(x_j - lse) (1 + 2 z lse) - (1 - a) [j = t] - a / V
Autograd of the usual operators saves the log-probabilities, in fp32 if the loss is computed in fp32, next
to the logits. This function saves lse and computes the probabilities again. The z-loss keeps lse near 0,
which helps training in low precision.

Papers: label smoothing (arXiv:1512.00567); z-loss (PaLM, arXiv:2204.02311, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms, LossReduction
from dlo_lib.kernels.dispatch import (
    KernelBackend,
    apply,
    backend_for,
    computed_in,
    is_recorded,
    once_differentiable,
    require_floating,
    require_shape,
    run,
)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: LossReduction = LossReduction.MEAN,
) -> Tensor:
    """Return the cross-entropy of ``logits``, () in fp32 or wider.

    Args:
        logits: (..., vocab), floating-point.
        targets: (...) int64, in [0, vocab) or ``ignore_index``. On a GPU another value makes the loss NaN.
        ignore_index, label_smoothing, z_loss: see ``CrossEntropyTerms``.
        reduction: the mean or the sum over the rows that are not ignored.

    Raises:
        UserError: the shapes or dtypes do not fit, an argument is out of range, or on the CPU a target is.
    """
    terms = CrossEntropyTerms(ignore_index, label_smoothing, z_loss)
    require_floating("logits", logits)
    if logits.ndim == 0:
        raise UserError("logits is a scalar: it should be (..., vocab)")
    require_targets(
        targets, tuple(logits.shape[:-1]), logits.shape[-1], terms, "that of logits without vocab"
    )
    flat = targets if targets.ndim == 1 else targets.reshape(-1)
    backend, mean = backend_for(logits), reduction is LossReduction.MEAN
    if is_recorded(logits):
        return apply(_CrossEntropy, logits, flat, terms, mean, backend)
    return reduced(_losses_and_lse(logits, flat, terms, backend)[0], flat, terms, mean, backend)[0]


def require_targets(
    targets: Tensor, shape: tuple[int, ...], vocab: int, terms: CrossEntropyTerms, because: str
) -> None:
    """Check the targets of rows of ``vocab`` logits.

    Raises:
        UserError: they are not int64, have another shape than ``shape``, or, on the CPU, are out of range.
    """
    if targets.dtype is not torch.int64:
        raise UserError(f"targets is {str(targets.dtype).removeprefix('torch.')}: it should be int64")
    require_shape("targets", targets, shape, because)
    # Elsewhere it would wait for the device; traced code has no values.
    if type(targets) is Tensor and targets.is_cpu and not torch.compiler.is_compiling():
        wrong = targets[((targets < 0) | (targets >= vocab)) & (targets != terms.ignore_index)]
        if wrong.numel():
            raise UserError(
                f"targets contains {wrong[0].item()}: it should be 0 to {vocab - 1}, or {terms.ignore_index}"
            )


def valid_rows(targets: Tensor, terms: CrossEntropyTerms) -> Tensor:
    """Return the number of rows that are not ignored, at least 1, ()."""
    return (targets != terms.ignore_index).sum().clamp(min=1)


def reduced(
    losses: Tensor, targets: Tensor, terms: CrossEntropyTerms, mean: bool, backend: KernelBackend
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses (rows,), (), or with ``mean`` the mean over the rows that are not ignored,
    and their number, ()."""
    if torch.compiler.is_compiling():
        return total_loss(losses, targets, terms, mean)
    result: tuple[Tensor, Tensor | None] = run(
        backend, "loss_and_gradient", total_loss, losses, targets, terms, mean
    )
    return result


def total_loss(
    losses: Tensor, targets: Tensor, terms: CrossEntropyTerms, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute what ``reduced`` returns in PyTorch."""
    if not mean:
        return losses.sum(), None
    count = valid_rows(targets, terms)
    return losses.sum() / count, count


def row_losses(logits: Tensor, targets: Tensor, terms: CrossEntropyTerms) -> tuple[Tensor, Tensor]:
    """Compute the loss and lse of each row in PyTorch, both (rows,), from (rows, vocab) and (rows,)."""
    losses = torch.empty(logits.shape[0], dtype=computed_in(logits.dtype), device=logits.device)
    lse = torch.empty_like(losses)
    for part in _parts(logits):
        wide = logits[part].to(lse.dtype)
        valid, index, wrong = _rows(targets[part], logits.shape[1], terms)
        largest = wide.amax(-1)
        # log_softmax reads the row once, logsumexp four times. The largest element is never -inf alone.
        lse[part] = largest - torch.log_softmax(wide, dim=-1).amax(-1)
        loss = lse[part] - (1 - terms.label_smoothing) * wide.gather(-1, index).squeeze(-1)
        if terms.label_smoothing:
            loss -= terms.label_smoothing * wide.mean(-1)
        if terms.z_loss:
            loss += terms.z_loss * lse[part].square()
        losses[part] = torch.where(valid, loss, 0).masked_fill_(wrong, float("nan"))
    return losses, lse


def logits_gradient(
    scale: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    terms: CrossEntropyTerms,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the logits in PyTorch, (rows, vocab).

    Args:
        scale: (rows,) the gradients of the losses.
        logits, targets, lse: those of ``row_losses``.
        out: receives the result; it may be ``logits``.
    """
    out = torch.empty_like(logits) if out is None else out
    for part in _parts(logits):
        valid, index, wrong = _rows(targets[part], logits.shape[1], terms)
        of_rows = torch.where(valid, scale[part].to(lse.dtype), 0).unsqueeze(-1)
        grad = torch.softmax(logits[part], dim=-1, dtype=lse.dtype)
        grad *= of_rows * (1 + 2 * terms.z_loss * lse[part].unsqueeze(-1)) if terms.z_loss else of_rows
        if terms.label_smoothing:
            grad -= of_rows * (terms.label_smoothing / logits.shape[-1])
        of_target = of_rows.masked_fill(wrong.unsqueeze(-1), 0) * (terms.label_smoothing - 1)
        grad.scatter_add_(-1, index, of_target)
        _clear_ignored(grad, valid, lse[part])
        out[part] = grad
    return out


def _rows(targets: Tensor, vocab: int, terms: CrossEntropyTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows are not ignored (rows,), an index of their target that exists (rows, 1), and which
    targets are wrong (rows,): on a GPU, which refuses no target, an index that does not exist ends the
    process."""
    valid, exists = targets != terms.ignore_index, (targets >= 0) & (targets < vocab)
    return valid, torch.where(valid & exists, targets, 0).unsqueeze(-1), valid & ~exists


def _clear_ignored(grad: Tensor, valid: Tensor, lse: Tensor) -> None:
    """Write 0 to the gradients of ignored rows with infinite logits, which are NaN: 0 times NaN. On a CPU,
    where the pass costs as much as a softmax, it is left out if there is no such row."""
    has_data = type(grad) is Tensor and grad.device.type == "cpu" and not torch.compiler.is_compiling()
    if has_data and not (~valid & ~lse.isfinite()).any():
        return
    grad.masked_fill_(~valid.unsqueeze(-1), 0)


def _parts(logits: Tensor) -> list[slice]:
    """Return slices of rows that stay in the cache from one operator to the next, about 8 MB in fp32. On a
    busy machine smaller parts are slower, because the threads wait for each other in every operator."""
    if isinstance(logits, FakeTensor):  # without data there is no cache
        return [slice(None)]
    rows, step = logits.shape[0], max(1, (1 << 21) // logits.shape[1])
    return [slice(start, start + step) for start in range(0, rows, step)]


def _losses_and_lse(
    logits: Tensor, targets: Tensor, terms: CrossEntropyTerms, backend: KernelBackend
) -> tuple[Tensor, Tensor]:
    """Return the loss and lse of each row, both (rows,), of logits (..., vocab) and targets (rows,)."""
    if not logits.numel():
        losses = torch.zeros_like(targets, dtype=computed_in(logits.dtype))
        return losses, losses
    rows = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
    result: tuple[Tensor, Tensor] = run(backend, "cross_entropy", row_losses, rows, targets, terms)
    return result


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        terms: CrossEntropyTerms,
        mean: bool,
        backend: KernelBackend,
    ) -> Tensor:
        ctx.backend, ctx.terms = backend, terms
        losses, lse = _losses_and_lse(logits, targets, terms, backend)
        total, count = reduced(losses, targets, terms, mean, backend)
        ctx.save_for_backward(logits, targets, lse, count)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, lse, count = ctx.saved_tensors
        if not logits.numel():
            return torch.zeros_like(logits), None, None, None, None
        rows = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
        scale = (scale if count is None else scale / count).expand(rows.shape[0])
        grad = run(ctx.backend, "cross_entropy", logits_gradient, scale, rows, targets, lse, ctx.terms)
        return grad if logits.ndim == 2 else grad.view(logits.shape), None, None, None, None
