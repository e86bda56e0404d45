"""The all-to-all form (DeepSpeed-Ulysses): attention over whole sequences, for a part of the heads.

Before attention, each rank has all heads of a part of the sequence; an all-to-all exchange gives it a part of
the heads of the whole sequence. Attention is then that of one process. A second exchange restores the parts
of the sequence.

    q, k, v   (batch, heads, seq / U, head_dim)  →  (batch, heads / U, seq, head_dim)
    out       (batch, heads / U, seq, head_dim)  →  (batch, heads, seq / U, head_dim)

U ranks need U query heads or a multiple. With fewer key and value heads than ranks, each rank receives a copy
of the one head that its query heads use; backward adds the gradients of the copies.

Bytes per rank, with b the numbers of the local queries (batch * heads * seq / U * head_dim) in bytes, and
kv_heads replaced by U if it is smaller. Each exchange occurs once in forward and once in backward; q, k and v
are one message:

    payload per exchange   b * (1 + 2 * kv_heads / heads)  and  b       sent: (U-1)/U of it
    sent in total          2 (U-1)/U * b * (2 + 2 * kv_heads / heads)

This decreases with the number of ranks, while a ring sends about the keys and values of the whole sequence
(``ring``). The ring has no limit for its size. Both combine: heads are exchanged inside groups of U ranks,
and the groups form a ring.

Papers: S. A. Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509); J. Fang, S. Zhao, USP (arXiv:2405.07719)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError


def sequence_to_heads(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange parts of the sequence for parts of the heads; called by every rank of the group.

    Args:
        q: (batch, heads, local, head_dim), the part of the sequence of this rank.
        k, v: (batch, kv_heads, local, head_dim).

    Returns q, k, v of the sequence of all ranks, in the order of the ranks, with heads / ranks query heads,
    those of rank 0 first, and the key and value heads that they use.

    Raises:
        UserError: the heads cannot be divided over the ranks.
    """
    ranks = dist.get_world_size(group)
    check_heads(q.shape[1], k.shape[1], ranks)
    if k.shape[1] < ranks:
        k, v = (kv.repeat_interleave(ranks // kv.shape[1], dim=1) for kv in (k, v))
    # (ranks, batch, local, heads of a rank, head_dim): one message for each rank
    parts = [tensor.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4) for tensor in (q, k, v)]
    heads = [part.shape[3] for part in parts]
    exchanged: Tensor = _AllToAll.apply(torch.cat(parts, dim=3), group)
    whole = exchanged.transpose(0, 1).flatten(1, 2).transpose(1, 2)  # (batch, heads of a rank, seq, head_dim)
    whole_q, whole_k, whole_v = whole.split(heads, dim=1)
    return whole_q, whole_k, whole_v


def heads_to_sequence(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange parts of the heads for parts of the sequence: the inverse of ``sequence_to_heads`` for q.

    Args:
        out: (batch, heads / ranks, seq, head_dim).

    Returns (batch, heads, seq / ranks, head_dim).
    """
    ranks = dist.get_world_size(group)
    parts = out.unflatten(2, (ranks, -1)).permute(2, 0, 3, 1, 4)  # (ranks, batch, local, heads, head_dim)
    exchanged: Tensor = _AllToAll.apply(parts, group)
    return exchanged.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Check that every rank receives the same number of query heads, and only whole groups of them.

    Raises:
        UserError: it does not. The message names numbers of ranks that work.
    """

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(ranks):
        others = [str(size) for size in range(1, heads + 1) if fits(size)]
        raise UserError(
            f"{heads} query and {kv_heads} key heads cannot be divided over {ranks} ranks of an all-to-all: "
            f"use one of {', '.join(others)}, or a ring"
        )


class _AllToAll(torch.autograd.Function):
    """Part i of the tensor of rank j becomes part j of the tensor of rank i. The adjoint is the same
    exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
