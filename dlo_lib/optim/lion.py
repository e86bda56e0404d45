"""Lion: every element moves by the learning rate, in the direction of an average of the gradients.

    u <- b1 m + (1 - b1) g        p <- p (1 - lr wd) - lr sign(u)        m <- b2 m + (1 - b2) g

The state is one average, 4 bytes of each fp32 parameter, where AdamW has 8. An element moves by lr however
small its gradient is, so the learning rate is 3 to 10 times smaller than that of AdamW. The decay of a step
is lr wd, so the weight decay is as many times larger. The update u is a temporary tensor.

Paper: X. Chen et al., Symbolic Discovery of Optimization Algorithms, program 1 (arXiv:2302.06675).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.foreach_step import ForeachOptimizer, Group


class Lion(ForeachOptimizer):
    """The optimiser of the module's docstring. The decay is decoupled, as in AdamW.

    Args:
        params: parameters or parameter groups.
        lr: the distance that each element moves.
        betas: b1 of the update and b2 of the average.
        weight_decay: the factor wd of the decay.
        foreach: whether a kernel computes an operation for all parameters of a group, which needs temporary
            memory for all of them; otherwise for one.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        foreach: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, options)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        averages = self.kept(params, "exp_avg")
        rate, (beta1, beta2) = group["lr"], group["betas"]
        updates = torch._foreach_lerp(averages, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-rate)
        torch._foreach_lerp_(averages, grads, 1 - beta2)
