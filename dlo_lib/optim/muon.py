"""Muon: the momentum of a matrix is replaced by the nearest matrix with orthonormal rows or columns.

    m <- b m + (1 - b) g        u = (1 - b) g + b m        u = U S Vᵀ        p <- p (1 - lr wd) - lr a U Vᵀ

The update U Vᵀ moves all directions of the matrix by the same length, and not mainly the few that dominate
the gradient. Five steps of a Newton-Schulz iteration compute it without a singular value decomposition: a
polynomial of odd degree, p(x) = 3.4445 x - 4.775 x³ + 2.0315 x⁵, brings all singular values to 0.7 ... 1.2.
The iteration is made of products of matrices, and bf16 is enough. The state is one buffer, 4 bytes of each
fp32 element, where AdamW has 8.

With a = 0.2 sqrt(max(rows, columns)) an update has the size of AdamW's, so that both share the learning
rate and the weight decay. Parameters that are no matrices have AdamW's update. Embeddings and the output
layer, whose rows are separate vectors, belong into a group with ``"muon": False``.

References: K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); J. Liu et al.,
Muon is Scalable for LLM Training (arXiv:2502.16982), equation 4; ``torch.optim.Muon`` (PyTorch 2.9).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.base.errors import UserError
from dlo_lib.optim.entry import Shapes
from dlo_lib.optim.foreach_step import ForeachOptimizer, Group
from dlo_lib.optim.moments import adam_directions

COEFFICIENTS = (3.4445, -4.775, 2.0315)
SCALES = ("adamw", "spectral")
LARGE_SIDE = 192
"""From this smaller side on a CPU multiplies matrices faster one by one than as a batch (up to 1.2 times)."""


def orthogonalised(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return U Vᵀ of each matrix U S Vᵀ, with singular values of 0.7 to 1.2 in place of 1.

    Args:
        matrices: (..., rows, columns), of any dtype.
        steps: the steps of the iteration.
        dtype: in which it computes.

    Returns:
        (..., rows, columns) in ``dtype``.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype).view(-1, *matrices.shape[-2:])
    if x.device.type == "cpu" and min(x.shape[1:]) >= LARGE_SIDE:
        if len(x) > 1:
            return torch.stack([orthogonalised(each, steps, dtype) for each in x]).reshape(matrices.shape)
        x = x.squeeze(0)
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the smaller product
    # The Frobenius norm is at least the largest singular value.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


class Muon(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Args:
        params: parameters or parameter groups. A group with ``"muon": False`` has AdamW's update.
        lr: the learning rate.
        weight_decay: the factor wd, decoupled as in AdamW.
        momentum: the factor b.
        nesterov: whether u looks a step ahead, as above; otherwise u = m.
        scale: "adamw" for the factor a above; "spectral" for sqrt(max(1, rows / columns)), the ``original``
            of PyTorch, whose learning rate is about 10 times larger.
        betas, eps: of AdamW's update.
        foreach: whether matrices of one shape are computed together, with temporary memory for all of them.
        dtype: of the iteration.

    Raises:
        UserError: there is no such ``scale``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        foreach: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if scale not in SCALES:
            raise UserError(f'scale is "{scale}": choose {" or ".join(SCALES)}')
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "scale": scale,
            "betas": betas,
            "eps": eps,
            "foreach": foreach,
            "dtype": str(dtype).removeprefix("torch."),  # a checkpoint has the groups as JSON
            "muon": True,
        }
        super().__init__(params, options)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        shapes: dict[tuple[int, int] | None, tuple[list[Tensor], list[Tensor]]] = {}
        for param, grad in zip(params, grads, strict=True):
            matrix = param.ndim > 1 and group["muon"]
            shape = (param.shape[0], math.prod(param.shape[1:])) if matrix else None
            same, their_grads = shapes.setdefault(shape, ([], []))
            same.append(param)
            their_grads.append(grad)
        for shape, (same, their_grads) in shapes.items():
            if shape is None:
                self._update_others(same, their_grads, group)
            else:
                self._update_matrices(same, their_grads, shape, group)

    def _update_others(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        """Update parameters that are no matrices, or embeddings, as AdamW does."""
        torch._foreach_add_(params, adam_directions(self, params, grads, group), alpha=-group["lr"])

    def _update_matrices(
        self, params: list[Tensor], grads: list[Tensor], shape: tuple[int, int], group: Group
    ) -> None:
        """Update parameters of (rows, ...) as matrices of ``shape``."""
        rows, columns = shape
        if group["scale"] == "adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        else:
            factor = math.sqrt(max(1, rows / columns))
        turned = orthogonalised(self._averaged(params, grads, shape, group), dtype=_dtype(group))
        for param, update in zip(params, turned, strict=True):
            param.add_(update.view(param.shape).to(param.dtype), alpha=-group["lr"] * factor)

    def _averaged(
        self, params: list[Tensor], grads: list[Tensor], shape: tuple[int, int], group: Group
    ) -> Tensor:
        """Update the momentum, and return u of each parameter, (parameters, *shape) in the group's dtype."""
        momentum = group["momentum"]
        buffers = self.kept(params, "momentum_buffer")
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        return torch.stack([update.reshape(shape).to(_dtype(group)) for update in updates])


def _dtype(group: Group) -> torch.dtype:
    named = group["dtype"]  # a sharded optimiser puts the argument itself into its groups
    dtype: torch.dtype = named if isinstance(named, torch.dtype) else getattr(torch, named)
    return dtype


def memory_of_foreach(shapes: Shapes, embeddings: Shapes) -> int:
    """Return the bytes of temporary memory of a step of fp32 parameters, matrices of one shape together."""
    vectors = {shape: number for shape, number in shapes.items() if len(shape) < 2}
    apart = [
        sum(4 * math.prod(shape) * number for shape, number in some.items()) for some in (vectors, embeddings)
    ]
    return max(*apart, *(number * _of_matrix(shape) for shape, number in shapes.items()))


def memory_of_loop(shapes: Shapes, embeddings: Shapes) -> int:
    """Return the bytes of temporary memory of a step of fp32 parameters, one after the other."""
    return memory_of_foreach(dict.fromkeys(shapes, 1), dict.fromkeys(embeddings, 1))


def _of_matrix(shape: tuple[int, ...]) -> int:
    """Return the bytes of a matrix: u in fp32 and twice in bf16, or two iterates and u in bf16, with the
    product of the smaller side and its polynomial."""
    if len(shape) < 2:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    return max(8 * rows * columns, 6 * rows * columns + 4 * min(rows, columns) ** 2)
