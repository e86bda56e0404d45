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
from functools import partial

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
        lengths = _root_mean_squares(params)
        torch._foreach_clamp_min_(lengths, eps2)
        torch._foreach_mul_(lengths, [-min(group["lr"], step**-0.5) for step in steps])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        shares = [step ** group["beta2_decay"] for step in steps]
        updates = self._variances(params, grads, shares, eps1)
        # V is not read again, so its memory becomes that of u.
        torch._foreach_clamp_min_(updates, eps1**2)
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, grads)
        excess = _root_mean_squares(updates)
        torch._foreach_div_(excess, group["d"])
        torch._foreach_clamp_min_(excess, 1.0)
        torch._foreach_div_(lengths, excess)
        torch._foreach_mul_(updates, lengths)
        torch._foreach_add_(params, updates)

    def _variances(
        self, params: list[Tensor], grads: list[Tensor], shares: list[float], eps1: float
    ) -> list[Tensor]:
        """Update the states, and return V of each parameter, a new tensor of its shape."""
        matrices = [number for number, param in enumerate(params) if param.ndim > 1]
        others = [number for number, param in enumerate(params) if param.ndim <= 1]
        found: dict[int, Tensor] = {}
        of_matrices = partial(self._of_matrices, eps1=eps1)
        for numbers, variances in ((matrices, of_matrices), (others, self._of_others)):
            if numbers:
                some, its = [params[number] for number in numbers], [grads[number] for number in numbers]
                of_some = variances(some, its, [shares[number] for number in numbers])
                found.update(zip(numbers, of_some, strict=True))
        return [found[number] for number in range(len(params))]

    def _of_matrices(
        self, params: list[Tensor], grads: list[Tensor], shares: list[float], eps1: float
    ) -> list[Tensor]:
        rows = self._means(params, grads, shares, "row_var", -1)
        columns = self._means(params, grads, shares, "col_var", -2)
        sizes = [row.mean(dim=-2, keepdim=True) for row in rows]
        torch._foreach_clamp_min_(sizes, eps1)
        scaled = torch._foreach_div(rows, sizes)  # the small factor, so that V is computed once
        return [row @ column for row, column in zip(scaled, columns, strict=True)]

    def _of_others(self, params: list[Tensor], grads: list[Tensor], shares: list[float]) -> list[Tensor]:
        kept = self.kept(params, "variance")
        _lerp(kept, torch._foreach_mul(grads, grads), shares)
        return [variance.clone() for variance in kept]

    def _means(
        self, params: list[Tensor], grads: list[Tensor], shares: list[float], name: str, dim: int
    ) -> list[Tensor]:
        """Update the state ``name``, the means of g² over ``dim`` of each matrix, and return it."""
        # The norm squared is the sum of the squares, without a tensor of them.
        means = [torch.linalg.vector_norm(grad, dim=dim, keepdim=True) for grad in grads]
        torch._foreach_mul_(means, means)
        torch._foreach_div_(means, [float(grad.shape[dim]) for grad in grads])
        for param, mean in zip(params, means, strict=True):
            if name not in self.state[param]:
                self.state[param][name] = torch.zeros_like(mean)
        kept = [self.state[param][name] for param in params]
        _lerp(kept, means, shares)
        return kept


def _lerp(kept: list[Tensor], new: Sequence[Tensor], shares: list[float]) -> None:
    """Move each tensor of ``kept`` by its share towards that of ``new``, in place. Parameters that have made
    as many steps have the same share: usually all."""
    for share in dict.fromkeys(shares):
        some = [number for number, each in enumerate(shares) if each == share]
        torch._foreach_lerp_([kept[number] for number in some], [new[number] for number in some], share)


def _root_mean_squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor, 0-dimensional."""
    norms = [*torch._foreach_norm([*tensors])]
    torch._foreach_div_(norms, [max(tensor.numel(), 1) ** 0.5 for tensor in tensors])
    return norms
