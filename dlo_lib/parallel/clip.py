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
def clip_sharded_grad_norm_(params: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup) -> Tensor:
    """Scale the gradients of ``params``, parts of which the ranks of ``group`` hold, to a global 2-norm of at most ``max_norm``.

    Returns the norm before, (), the same on every rank, in at least fp32 and on the gradients' device.
    """
    gradients = [param.grad for param in params if param.grad is not None]
    norms = torch._foreach_norm([gradient for gradient in gradients if gradient.numel()])
    like = gradients[0] if gradients else torch.zeros(())
    wide = torch.promote_types(like.dtype, torch.float32)
    squares = torch.stack([norm.to(wide) for norm in norms]).square().sum() if norms else torch.zeros((), dtype=wide, device=like.device)
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + _EPSILON)).clamp(max=1.0).to(like.dtype))
    return norm
