"""Optimisers that the library does not know, by what an update depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Elementwise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group["lr"])

    def update(self, param: Tensor, grad: Tensor, lr: float) -> None:
        param.add_(torch.sign(grad), alpha=-lr)


class Lars(Lion):
    """The norm of a parameter scales its update."""

    def update(self, param: Tensor, grad: Tensor, lr: float) -> None:
        param.add_(grad, alpha=-float(lr * param.norm()))


class ClippedLars(Lars):
    """The norm of all gradients, if it is large, scales their momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads if grad is not None]).norm()
        self.factor = 1 / max(1.0, float(norm) / 100)
        super().step()

    def update(self, param: Tensor, grad: Tensor, lr: float) -> None:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
        super().update(param, momentum.mul_(0.9).add_(grad, alpha=self.factor), lr)


class Prodigy(torch.optim.Optimizer):
    """Adam whose step size ``d`` is estimated from all parameters, without bias correction and decay
    (K. Mishchenko and A. Defazio, Prodigy, arXiv:2306.06101)."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d": d0, "d0": d0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]
        d, slow = first["d"], 0.999**0.5
        rate, numerator, denominator = d * first["lr"], first["numerator"] * slow, 0.0
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param in params:
            state, grad = self.state[param], param.grad
            if not state:
                state |= {key: torch.zeros_like(param) for key in ("mean", "square", "sum")}
                state["first"] = param.clone()
            numerator += d / first["d0"] * rate * float((grad * (state["first"] - param)).sum())
            state["mean"].mul_(0.9).add_(grad, alpha=0.1 * d)
            state["square"].mul_(0.999).addcmul_(grad, grad, value=0.001 * d * d)
            state["sum"].mul_(slow).add_(grad, alpha=d / first["d0"] * rate)
            denominator += float(state["sum"].abs().sum())
        d = max(d, numerator / denominator) if denominator else d
        for group in self.param_groups:
            group["d"], group["numerator"] = d, numerator
        for param in params:
            state = self.state[param]
            param.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8 * d), value=-rate)
