"""Clipping by global norm where each rank holds a part of the gradients: the squares add up over ranks before the root is taken.

    norm = sqrt(sum over ranks of sum of squares),   gradients *= min(1, max_norm / (norm + 1e-6))

One all-reduce of a single number; it must be read nowhere, so an accelerator is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

_EPSILON = 1e-6  # PyTorch's, so that clipping a sharded gradient is clipping the whole one


@torch.no_grad()
def clip_sharded_grad_norm_(
    params: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup, device: torch.device | None = None
) -> Tensor:
    """Scale the gradients of ``params``, parts of which the ranks of ``group`` hold, to a global 2-norm of at most ``max_norm``.

    Args:
        params: a rank may have none, and those that it has no gradient.
        device: from where ``group`` communicates; None for the CPU.

    Returns the norm before, () fp64 on ``device``, the same on every rank.
    """
    gradients = [param.grad for param in params if param.grad is not None]
    # fp64 on every rank: what a rank holds, if anything, does not say in which dtype the others add up.
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if filled := [gradient for gradient in gradients if gradient.numel()]:
        squares += torch.stack([norm.double() for norm in torch._foreach_norm(filled)]).square().sum()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if filled:
        torch._foreach_mul_(filled, (max_norm / (norm + _EPSILON)).clamp(max=1.0).to(filled[0]))
    return norm
