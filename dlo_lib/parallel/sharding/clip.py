"""Clipping by the global norm when each rank holds a part of the gradients. The powers are summed over the
ranks before the root is taken.

    norm = (sum over ranks of sum of |g|^p)^(1/p),   gradients *= min(1, max_norm / (norm + 1e-6))

Cost: one all-reduce of a scalar along each mesh dimension. The CPU does not read the scalar, so it does not
wait for the accelerator. ``nn.utils.clip_grad_norm_`` computes the same on the gradients of FSDP and ZeRO
(``sharding.sharded_grad``), with one all-reduce for each gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.errors import UserError
from dlo_lib.parallel.sharding.sharded_grad import GradScope, local_grad, norm_of_part, sum_of_parts

_EPSILON = 1e-6  # the value of torch.nn.utils.clip_grad_norm_, so that the results are equal


@torch.no_grad()
def clip_sharded_grad_norm_(
    params: Iterable[Tensor],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
    *,
    norm_type: float = 2.0,
    copies: Collection[Tensor] = (),
) -> Tensor:
    """Scale the gradients of ``params`` so that their norm over all ranks is at most ``max_norm``; called by
    every rank.

    Args:
        params: the local parts of the parameters. A rank may have none, and a part may have no gradient.
        groups: the groups, one for each mesh dimension, whose ranks hold different parts. The powers are
            summed over each group in turn.
        device: the device on which ``groups`` communicate; None for the CPU.
        norm_type: p > 0 of the p-norm; ``math.inf`` for the largest absolute value.
        copies: the members of ``params`` that another rank counts. They are scaled, but not counted here.

    Returns the norm before scaling, () fp64 on ``device``, the same on every rank.

    Raises:
        UserError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise UserError(f"norm_type is {norm_type}: give a positive number, or math.inf")
    device = device or torch.device("cpu")
    with torch._C.DisableTorchFunctionSubclass():
        held = [(param, local_grad(param.grad)) for param in params if param.grad is not None]
        gradients = [grad for _, grad in held if grad.numel()]
        own = [grad for param, grad in held if not any(param is copy for copy in copies)]
        counted = [grad for grad in own if grad.numel()]
        # Sum in fp64 on every rank, because a rank without parts does not know the dtype of the other ranks.
        local = torch.zeros((), dtype=torch.float64, device=device)
        if counted:
            norms = torch._foreach_norm(counted, float(norm_type))
            local += norm_of_part(torch.stack([norm.double() for norm in norms]), float(norm_type))
        norm = sum_of_parts(local, float(norm_type), GradScope(groups, device))
        if gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + _EPSILON)).clamp(max=1.0).to(gradients[0]))
    return norm
