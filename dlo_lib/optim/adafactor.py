"""Adafactor: Adam's second moment of a matrix from the means of its rows and columns, without momentum.

    R <- b R + (1 - b) mean over columns of g²       C <- b C + (1 - b) mean over rows of g²
    V = R C / mean(R)        u = g / sqrt(V)        p <- p - a u / max(1, rms(u) / d)

where b = 1 - t^-0.8 in step t, and a = max(eps2, rms(p)) min(lr, 1 / sqrt(t)). V is the matrix of rank 1 that
is nearest to the average of g² which Adam keeps, by the I-divergence. A matrix of n x m elements has n + m
numbers of state instead of 2 n m. Parameters with one dimension have V for each element. The step is
relative: a matrix whose elements are ten times as large moves ten times as far. The limit d of rms(u)
replaces the warm-up that Adam needs while its averages are young.

The values and the names of the states are those of ``torch.optim.Adafactor``, in which eps1 bounds V and
mean(R) from below; the paper adds it to g². The norms stay on the device of the parameters, so that a step on
a GPU does not wait for them.

Paper: N. Shazeer and M. Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost,
algorithms 4 and 5 (arXiv:1804.04235).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.foreach_step import ForeachOptimizer, Group


class Adafactor(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Args:
        params: parameters or parameter groups.
        lr: the largest step of a parameter, relative to its root mean square.
        beta2_decay: the exponent of t in b, below 0.
        eps: eps1 and eps2. None as eps1 is the precision of the dtype of the parameters.
        d: the largest root mean square of an update.
        weight_decay: the decay for each step is lr times this.
        foreach: whether an operation is computed for all parameters of a group; otherwise for one.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        foreach: bool = True,
    ) -> None:
        options = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        super().__init__(params, options)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(params[0].dtype).eps if eps1 is None else eps1
        steps = self.counted(params)
        lengths = [
            -min(group["lr"], step**-0.5) * size.clamp_(min=eps2)
            for step, size in zip(steps, _root_mean_squares(params), strict=True)
        ]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        shares = [step ** group["beta2_decay"] for step in steps]
        updates = [
            self._matrix_variance(param, grad, share, eps1)
            if param.ndim > 1
            else self._variance(param, grad, share)
            for param, grad, share in zip(params, grads, shares, strict=True)
        ]
        # V is not read again, so its memory becomes that of u.
        torch._foreach_clamp_min_(updates, eps1**2)
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, grads)
        excess = [size.div_(group["d"]).clamp_(min=1.0) for size in _root_mean_squares(updates)]
        torch._foreach_mul_(updates, [length / over for length, over in zip(lengths, excess, strict=True)])
        torch._foreach_add_(params, updates)

    def _matrix_variance(self, param: Tensor, grad: Tensor, share: float, eps1: float) -> Tensor:
        """Update R and C of ``param``, (..., rows, columns), and return V, a new tensor of its shape."""
        state = self.state[param]
        means = {
            # The norm squared is the sum of the squares, without a tensor of them.
            name: torch.linalg.vector_norm(grad, dim=dim, keepdim=True).square_().div_(grad.shape[dim])
            for name, dim in (("row_var", -1), ("col_var", -2))
        }
        for name, mean in means.items():
            if name not in state:
                state[name] = torch.zeros_like(mean)
            state[name].lerp_(mean, share)
        rows = state["row_var"]
        # The small factor is divided, so that V is computed once.
        return (rows / rows.mean(dim=-2, keepdim=True).clamp_(min=eps1)) @ state["col_var"]

    def _variance(self, param: Tensor, grad: Tensor, share: float) -> Tensor:
        """Update V of ``param``, which is no matrix, and return a copy."""
        (variance,) = self.kept([param], "variance")
        variance.lerp_(grad.square(), share)
        return variance.clone()


def _root_mean_squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor, 0-dimensional."""
    norms = torch._foreach_norm([*tensors])
    return [norm / max(tensor.numel(), 1) ** 0.5 for norm, tensor in zip(norms, tensors, strict=True)]
