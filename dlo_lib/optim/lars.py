"""LARS: SGD with momentum and one learning rate for each layer.

    r = trust |p| / (|g| + wd |p|)        m <- b m + r (g + wd p)        p <- p - lr m

The ratio r is the largest rate at which the step of a layer stays small beside its weights. Layers of a
convolutional network differ in |p| / |g| by orders of magnitude, and one rate for all is then limited by
the most sensitive layer. Biases and norms, which have one dimension, have r = 1.

The momentum is that of ``torch.optim.SGD``: the rate is outside of m, so a schedule acts at once. The paper
has it inside.

Paper: Y. You, I. Gitman and B. Ginsburg, Large Batch Training of Convolutional Networks (arXiv:1708.03888).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.foreach_step import ForeachOptimizer, Group


class LARS(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Args:
        params: parameters or parameter groups.
        lr: the rate of all layers, which r multiplies.
        momentum: the factor b.
        weight_decay: the factor wd.
        trust: the factor of r, far below 1.
        nesterov: whether p moves by b m + r (g + wd p), a step ahead.
        foreach: whether an operation is computed for all parameters of a group; otherwise for one.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        nesterov: bool = False,
        foreach: bool = True,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "nesterov": nesterov,
            "foreach": foreach,
        }
        super().__init__(params, options)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        ratios = []
        norms = self.norms([*params, *params], [*params, *grads])
        for param, weight, grad in zip(params, norms[: len(params)], norms[len(params) :], strict=True):
            ratio = group["trust"] * weight / (grad + decay * weight)
            moves = param.ndim > 1 and (weight > 0) & (grad > 0)
            ratios.append(torch.where(torch.as_tensor(moves), ratio, torch.ones_like(ratio)))
        buffers = self.kept(params, "momentum_buffer")
        updates = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_mul_(updates, ratios)
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, updates)
        if group["nesterov"]:
            torch._foreach_add_(updates, buffers, alpha=momentum)
        torch._foreach_add_(params, updates if group["nesterov"] else buffers, alpha=-group["lr"])
