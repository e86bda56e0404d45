"""Schedule-free AdamW: an average of the iterates takes the place of a schedule that ends at a known step.

    y = (1 - b1) z + b1 x            the gradient g is taken at y
    z <- z - lr_t (g / (sqrt(v') + eps) + wd y)
    x <- (1 - c) x + c z             with c = lr_t² / (lr_1² + ... + lr_t²)

The iterate z moves as AdamW without momentum, and x is the average of all z, which is the model to
evaluate. A learning rate that falls has the effect of an average, so a constant rate is enough after the
warm-up, and a training can be continued or stopped at any step. The state is z and v, as large as AdamW's:
the parameters hold y in training, and x is computed from y and z. So ``optimizer.eval()`` and
``optimizer.train()`` are called where ``model.eval()`` and ``model.train()`` are.

Paper: A. Defazio et al., The Road Less Scheduled, algorithm 1 (arXiv:2405.15682).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.base.errors import UserError
from dlo_lib.optim.foreach_step import ForeachOptimizer, Group
from dlo_lib.optim.moments import root_of_squares


class ScheduleFreeAdamW(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Save and evaluate the model after :meth:`eval`, and call :meth:`train` before the next step. The state
    dict says which of the two the parameters hold, so save model and optimiser at the same point.

    Args:
        params: parameters or parameter groups.
        lr: the rate after the warm-up; it is constant.
        betas: b1, which places y between z and x, and the factor of the average v.
        eps: the constant beside the root.
        weight_decay: the factor wd, at y.
        warmup_steps: the steps in which the rate rises linearly from zero.
        foreach: whether an operation is computed for all parameters of a group; otherwise for one.

    Raises:
        UserError: b1 is 0, so that y does not contain x; a step is taken in evaluation.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        foreach: bool = True,
    ) -> None:
        if not 0 < betas[0] < 1:
            raise UserError(f"betas[0] is {betas[0]}: choose a number between 0 and 1, such as 0.9")
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "foreach": foreach,
            "training": True,
            "steps": 0,
            "squares_of_lr": 0.0,
        }
        super().__init__(params, options)

    def eval(self) -> None:
        """Let the parameters hold x, the average to evaluate and to save."""
        self._hold("eval")

    def train(self) -> None:
        """Let the parameters hold y, where gradients are taken."""
        self._hold("train")

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the parameters hold x in the block, and y exactly as before afterwards."""
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in params]
        modes = [group["training"] for group in self.param_groups]
        self.eval()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, before)
            for group, mode in zip(self.param_groups, modes, strict=True):
                group["training"] = mode

    @torch.no_grad()
    def _hold(self, mode: str) -> None:
        training = mode == "train"
        for group in self.param_groups:
            if group["training"] != training:
                beta1 = group["betas"][0]
                for param in group["params"]:
                    if "z" in self.state[param]:
                        # y = (1 - b1) z + b1 x, and x = z + (y - z) / b1
                        param.lerp_(self.state[param]["z"], 1 - beta1 if training else 1 - 1 / beta1)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not all(group["training"] for group in self.param_groups):
            raise UserError("the parameters hold the average: call optimizer.train() before the step")
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["steps"] += 1
            group["squares_of_lr"] += self._rate(group) ** 2
        super().step()
        return loss

    @staticmethod
    def _rate(group: Group) -> float:
        """Return the rate of the current step."""
        step = group["steps"]
        rise = min(1.0, step / group["warmup_steps"]) if group["warmup_steps"] else 1.0
        return group["lr"] * rise

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        beta1, rate = group["betas"][0], self._rate(group)
        share = rate**2 / group["squares_of_lr"] if group["squares_of_lr"] else 0.0
        for param in params:
            if "z" not in self.state[param]:
                self.state[param]["z"] = param.clone()
        iterates = [self.state[param]["z"] for param in params]
        updates = root_of_squares(self, params, grads, self.counted(params), group)
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, grads)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        # With x = (y - (1 - b1) z) / b1 and u = updates, the new y is
        #   (1 - b1) (z - lr u) + b1 (1 - c) x + b1 c (z - lr u) = (1 - c) y + c z + lr (b1 (1 - c) - 1) u
        torch._foreach_lerp_(params, iterates, share)
        torch._foreach_add_(params, updates, alpha=rate * (beta1 * (1 - share) - 1))
        torch._foreach_add_(iterates, updates, alpha=-rate)
