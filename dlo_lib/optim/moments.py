"""Adam's direction, for the optimisers that change its length or its coordinates.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g²        u = m' / (sqrt(v') + eps)

where m' = m / (1 - b1^t) and v' = v / (1 - b2^t) correct the averages, which start at zero. The constant
eps is outside of the root, as in PyTorch.

Paper: D. Kingma and J. Ba, Adam: A Method for Stochastic Optimization, algorithm 1 (arXiv:1412.6980).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.optim.foreach_step import ForeachOptimizer, Group


def adam_directions(
    optimizer: ForeachOptimizer, params: list[Tensor], grads: list[Tensor], group: Group
) -> list[Tensor]:
    """Update the averages of ``params``, and return the direction u of each, a new tensor of its shape.

    The states are those of ``torch.optim.Adam``: ``step``, ``exp_avg`` and ``exp_avg_sq``. The group has the
    keys ``betas`` and ``eps``.
    """
    beta1 = group["betas"][0]
    steps, averages = optimizer.counted(params), optimizer.kept(params, "exp_avg")
    torch._foreach_lerp_(averages, grads, 1 - beta1)
    directions = root_of_squares(optimizer, params, grads, steps, group)
    torch._foreach_mul_(directions, [1 - beta1**step for step in steps])
    torch._foreach_reciprocal_(directions)
    torch._foreach_mul_(directions, averages)
    return directions


def root_of_squares(
    optimizer: ForeachOptimizer, params: list[Tensor], grads: list[Tensor], steps: list[int], group: Group
) -> list[Tensor]:
    """Update v of ``params``, and return sqrt(v') + eps of each, the only temporary tensor of its size.

    Args:
        steps: how many steps each parameter has made, with this one.
    """
    beta2, squares = group["betas"][1], optimizer.kept(params, "exp_avg_sq")
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
    torch._foreach_add_(roots, group["eps"])
    return [*roots]


def norm_ratios(lengths: list[Tensor], norms: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Return ``lengths`` over ``norms``, 0-dimensional; 1 where one of the two is zero, and for parameters
    with fewer than two dimensions.

    Args:
        lengths: the norm of each parameter.
        norms: the norm of each update.
    """
    ratios = []
    for length, norm, param in zip(lengths, norms, params, strict=True):
        one = torch.ones_like(norm)
        ratios.append(one if param.ndim < 2 else torch.where((length > 0) & (norm > 0), length / norm, one))
    return ratios
