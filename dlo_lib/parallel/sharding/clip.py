"""Clipping by the global norm when each rank holds a part of the gradients. The squares are summed over the
ranks before the square root is taken.

    norm = sqrt(sum over ranks of sum of squares),   gradients *= min(1, max_norm / (norm + 1e-6))

Cost: one all-reduce of a scalar along each mesh dimension. The CPU does not read the scalar, so it does not
wait for the accelerator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_EPSILON = 1e-6  # the value of torch.nn.utils.clip_grad_norm_, so that the results are equal


@torch.no_grad()
def clip_sharded_grad_norm_(
    params: Iterable[Tensor],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
    *,
    copies: Collection[Tensor] = (),
) -> Tensor:
    """Scale the gradients of ``params`` so that the 2-norm over all ranks is at most ``max_norm``; called by
    every rank.

    Args:
        params: the local parts of the parameters. A rank may have none, and a part may have no gradient.
        groups: the groups, one for each mesh dimension, whose ranks hold different parts. The squares are
            summed over each group in turn.
        device: the device on which ``groups`` communicate; None for the CPU.
        copies: the members of ``params`` that another rank counts. They are scaled, but not counted here.

    Returns the norm before scaling, () fp64 on ``device``, the same on every rank.
    """
    held = [param for param in params if param.grad is not None and param.grad.numel()]
    gradients = [param.grad for param in held if param.grad is not None]
    own = [param for param in held if not any(param is copy for copy in copies)]
    counted = [param.grad for param in own if param.grad is not None]
    # Sum in fp64 on every rank, because a rank without parts does not know the dtype of the other ranks.
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        squares += torch.stack([norm.double() for norm in torch._foreach_norm(counted)]).square().sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + _EPSILON)).clamp(max=1.0).to(gradients[0]))
    return norm
