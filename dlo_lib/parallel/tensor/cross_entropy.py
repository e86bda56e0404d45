"""Cross-entropy of logits whose vocabulary is cut over the ranks. The logits are never gathered.

    loss = log(sum over v of exp(z_v)) - z_target

Each rank computes the logarithm of the sum over its part of the vocabulary, and the logit of the target if
the target is in its part (0 otherwise). One all-gather of these two numbers per token gives

    log-sum-exp = log(sum over r of exp(log-sum-exp_r)),   z_target = sum over r of z_target_r

on every rank. The gradient, softmax(z) - onehot(target), needs no communication.

Bytes sent per rank: 2 * tokens * (t-1) numbers in fp32 or wider (3 with label smoothing), against
tokens * vocab * (t-1)/t for gathered logits. Memory: the logits, kept for backward, and their gradient.

Paper: Megatron-LM (arXiv:1909.08053), section 3, with three all-reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.torch_compat import all_gather_single
from dlo_lib.kernels.cross_entropy import require_targets
from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms
from dlo_lib.kernels.dispatch import require_rows
from dlo_lib.parallel.tensor.exchange import TensorGroup


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    first: int,
    group: TensorGroup,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the sum of the losses of the valid tokens, () in fp32 or wider, equal on all ranks. A token
    whose target is ``ignore_index`` has the loss 0. Logits may be -inf, as where a vocabulary is masked.

    Args:
        logits: (..., rows), this rank's part of the vocabulary, which may be empty.
        targets: (...) int64, tokens of the whole vocabulary or ``ignore_index``, equal on all ranks. On a GPU
            another value makes the loss NaN.
        first: the token of the first logit of this rank.
        group: the ranks.
        vocab_size: the size of the whole vocabulary.
        ignore_index: as in ``F.cross_entropy``.
        label_smoothing: as in ``F.cross_entropy``, from 0 to 1.

    Raises:
        UserError: ``label_smoothing`` is not between 0 and 1, the shapes or dtypes do not fit, or on the CPU
            a target is out of range.
    """
    terms = CrossEntropyTerms(ignore_index, label_smoothing)
    require_rows("logits", logits)
    shape = tuple(logits.shape[:-1])
    require_targets(targets, shape, vocab_size, terms, "that of logits without the vocabulary")
    flat = logits.reshape(targets.numel(), logits.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return _CrossEntropy.apply(
        flat, targets.reshape(-1), first, group, vocab_size, ignore_index, label_smoothing
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        group: TensorGroup,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        tokens, rows = logits.shape
        valid = targets != ignore_index
        local = targets - first
        inside = (local >= 0) & (local < rows) & valid
        local = local.masked_fill_(~inside, 0).unsqueeze(1)
        stats = logits.new_zeros(3 if smoothing else 2, tokens)
        torch.logsumexp(logits, 1, out=stats[0])
        if rows:  # Masks are filled, because a product of 0 and an infinite logit is NaN.
            stats[1] = logits.gather(1, local).squeeze(1).masked_fill_(~inside, 0)
        if smoothing:
            torch.sum(logits, 1, out=stats[2])
        by_rank = stats.new_empty(group.ranks, *stats.shape)  # (t, 2 or 3, tokens)
        all_gather_single(by_rank.view(-1), stats.view(-1), group=group.group)
        log_sum = torch.logsumexp(by_rank[:, 0], 0)
        losses = log_sum - (1 - smoothing) * by_rank[:, 1].sum(0)
        if smoothing:
            losses -= smoothing / vocab_size * by_rank[:, 2].sum(0)
        ctx.save_for_backward(logits, log_sum, local, inside, valid)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        losses.masked_fill_(valid & ((targets < 0) | (targets >= vocab_size)), torch.nan)
        return losses.masked_fill_(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, log_sum, local, inside, valid = ctx.saved_tensors
        grad_logits = (logits - log_sum.unsqueeze(1)).exp_()  # softmax, (tokens, rows)
        if ctx.smoothing:
            grad_logits -= ctx.smoothing / ctx.vocab_size
        if logits.shape[1]:
            target = inside.to(grad_logits.dtype).unsqueeze(1) * (ctx.smoothing - 1)
            grad_logits.scatter_add_(1, local, target)
        grad_logits *= grad
        return grad_logits.masked_fill_(~valid.unsqueeze(1), 0), None, None, None, None, None, None
