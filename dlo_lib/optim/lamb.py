"""LAMB: Adam's update of each layer, rescaled to the norm of the layer's weights, for large batches.

    u <- m' / (sqrt(v') + eps) + wd p        p <- p - lr |p| / |u| u

The averages m' and v' are those of Adam. In one step a layer moves by the fraction lr of its norm,
whatever its gradient is, so no layer diverges first at the large learning rates of large batches. Biases
and norms, which have one dimension, move by lr u: a bias that begins at zero has no norm to compare with.

Paper: Y. You et al., Large Batch Optimization for Deep Learning, algorithm 2 (arXiv:1904.00962).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.foreach_step import ForeachOptimizer, Group
from dlo_lib.optim.moments import adam_directions, norm_ratios


class LAMB(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Args:
        params: parameters or parameter groups.
        lr: the fraction of its norm by which a layer moves.
        betas: the factors b1 and b2 of Adam's averages.
        eps: the constant beside the root.
        weight_decay: the factor wd. It is inside the norm of u, as in the paper, so it turns the update and
            does not make it longer.
        foreach: whether an operation is computed for all parameters of a group; otherwise for one.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        foreach: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, options)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        updates = adam_directions(self, params, grads, group)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        norms = self.norms([*params, *params], [*params, *updates])
        ratios = norm_ratios(norms[: len(params)], norms[len(params) :], params)
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(params, updates, alpha=-group["lr"])
