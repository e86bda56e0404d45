"""Clipping by the global norm when each rank holds a part of the gradients. The powers are summed over the
ranks before the root is taken.

    norm = (sum over ranks of sum of |g|^p)^(1/p),   gradients *= min(1, max_norm / (norm + 1e-6))

Parameters may be cut along different mesh dimensions: with experts, some over the ranks of ``ep``, the others
over all ranks with different data. Their powers are then summed separately.

Cost: one all-reduce of a scalar along each mesh dimension, for each of these kinds of parameters. The CPU
does not read the scalar, so it does not wait for the accelerator. ``nn.utils.clip_grad_norm_`` computes the
same on the gradients of FSDP and ZeRO
(``sharding.sharded_grad``), with one all-reduce for each gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.sharding.sharded_grad import GradScope, local_grad, norm_of_part, sum_of_parts

_EPSILON = 1e-6  # the value of torch.nn.utils.clip_grad_norm_, so that the results are equal


@torch.no_grad()
def clip_sharded_grad_norm_(
    params: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
    *,
    norm_type: float = 2.0,
    copies: Collection[Tensor] = (),
    groups_of: Mapping[nn.Parameter, Sequence[dist.ProcessGroup]] | None = None,
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
        groups_of: for each parameter the groups whose ranks hold other parts of it, in addition to
            ``groups``; equal on all ranks of these groups. None if there are none.

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
        own = [(param, grad) for param, grad in held if not any(param is copy for copy in copies)]
        counted: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        if groups_of is None:
            counted[()] = [grad for _, grad in own]
        else:  # all parameters, because a rank may count none that is cut over a group
            counted = {tuple(over): [] for over in groups_of.values()}
            for param, grad in own:
                counted[tuple(groups_of[param])].append(grad)
        norms = [
            sum_of_parts(_norm_of(grads, float(norm_type), device), float(norm_type), GradScope(over, device))
            for over, grads in counted.items()
        ]
        local = norm_of_part(torch.stack([*norms, _norm_of([], norm_type, device)]), float(norm_type))
        norm = sum_of_parts(local, float(norm_type), GradScope(groups, device))
        multiply(gradients, (max_norm / (norm + _EPSILON)).clamp(max=1.0))
    return norm


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply ``gradients``, in place, by ``factor``, (), in fp32 or wider.

    In fp32 and fp64, the gradients of a dtype are multiplied together. In bf16 and fp16, PyTorch would first
    round a factor of no dimension to the dtype of the gradient, by up to 0.4 % in bf16; one with as many
    dimensions as the gradient keeps its dtype.
    """
    wide: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in gradients:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        if grad.dtype == dtype:
            wide.setdefault((dtype, grad.device), []).append(grad)
        else:
            grad.mul_(factor.to(grad.device, dtype).view((1,) * grad.ndim))
    for (dtype, device), grads in wide.items():
        torch._foreach_mul_(grads, factor.to(device, dtype))


def _norm_of(grads: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """Return the norm of all elements of ``grads``, () fp64 on ``device``; 0 without elements."""
    # Sum in fp64 on every rank, because a rank without parts does not know the dtype of the other ranks.
    norm = torch.zeros((), dtype=torch.float64, device=device)
    filled: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            filled.setdefault(grad.dtype, []).append(grad)
    norms: list[Tensor] = []
    for dtype, same in filled.items():
        wide = torch.promote_types(dtype, torch.float32)  # fp16 can overflow, bf16 has 3 digits
        norms += torch._foreach_norm(same, power, dtype=None if wide == dtype else wide)
    if norms:
        norm += norm_of_part(torch.stack([norm.double() for norm in norms]), power)
    return norm
