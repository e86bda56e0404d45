"""SOAP: Adam in the coordinates in which the gradients of a matrix are least correlated, those of Shampoo.

    L <- b3 L + (1 - b3) g gᵀ        R <- b3 R + (1 - b3) gᵀ g        L = Q_L D Q_Lᵀ, R = Q_R D' Q_Rᵀ
    g' = Q_Lᵀ g Q_R        m' = Q_Lᵀ m Q_R        v <- b2 v + (1 - b2) g'²
    p <- p - lr Q_L m' / (sqrt(v) + eps) Q_Rᵀ

Shampoo scales the gradient of a matrix by L^-1/4 g R^-1/4. That is the same as Adafactor's scaling in the
eigenbases of L and R. SOAP uses Adam's scaling there, which also follows the gradients while the bases are
old: they are only computed anew in every tenth step, by one step of a power iteration and a QR
decomposition. The state of a matrix of r rows and c columns is m, v, and twice r² + c² elements.

A side that is longer than ``max_side`` keeps its coordinates. Parameters that are no matrices have AdamW's
update. The first gradient of a matrix only begins its statistics.

References: N. Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, algorithm 3
(arXiv:2409.11321); V. Gupta, T. Koren and Y. Singer, Shampoo (arXiv:1802.09568).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.entry import Shapes
from dlo_lib.optim.foreach_step import ForeachOptimizer, Group
from dlo_lib.optim.moments import adam_directions

SIDES = ("left", "right")
MAX_SIDE = 8192


class SOAP(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate, of the size of AdamW's.
        betas: the factors b1 and b2 of Adam's averages.
        basis_beta: the factor b3 of L and R.
        eps: the constant beside the root.
        weight_decay: the factor of the decay, decoupled as in AdamW.
        every: the steps between two computations of the bases.
        max_side: the longest side with a basis.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        basis_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        max_side: int = MAX_SIDE,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "basis_beta": basis_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "every": every,
            "max_side": max_side,
            "foreach": False,
        }
        super().__init__(params, options)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        for param, grad in zip(params, grads, strict=True):
            if param.ndim < 2:
                (direction,) = adam_directions(self, [param], [grad], group)
            else:
                whole = self._direction(param, grad.reshape(grad.shape[0], -1), group)
                if whole is None:  # the first gradient
                    continue
                direction = whole.view(param.shape)
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(direction, alpha=-group["lr"])

    def _direction(self, param: Tensor, grad: Tensor, group: Group) -> Tensor | None:
        """Return the direction of a matrix, (rows, columns); None for its first gradient."""
        state, (beta1, beta2) = self.state[param], group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            self._follow(state, grad, group)
            for side in SIDES:
                if (statistics := state.get(side)) is not None:
                    # Descending, as the power iteration orders them.
                    state[f"{side}_basis"] = torch.linalg.eigh(statistics)[1].flip(1)
            return None
        (step,) = self.counted([param])
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(grad, 1 - beta1)
        turned = _turned(state, grad)
        square.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        scale = square.div(1 - beta2**step).sqrt_().add_(group["eps"])
        direction = _turned(state, _turned(state, average).div_(scale), back=True) / (1 - beta1**step)
        self._follow(state, grad, group)
        if step % group["every"] == 0:
            for side in SIDES:
                if (statistics := state.get(side)) is not None:
                    basis = state[f"{side}_basis"]
                    state[f"{side}_basis"] = torch.linalg.qr(statistics @ basis).Q
        return direction

    @staticmethod
    def _follow(state: dict[str, Tensor], grad: Tensor, group: Group) -> None:
        """Update L and R with the gradient (rows, columns)."""
        for side, matrix in zip(SIDES, (grad, grad.mT), strict=True):
            if matrix.shape[0] <= group["max_side"]:
                if side not in state:
                    state[side] = grad.new_zeros(matrix.shape[0], matrix.shape[0])
                state[side].lerp_(matrix @ matrix.mT, 1 - group["basis_beta"])


def _turned(state: dict[str, Tensor], matrix: Tensor, back: bool = False) -> Tensor:
    """Return Q_Lᵀ ``matrix`` Q_R, or with ``back`` Q_L ``matrix`` Q_Rᵀ; a new tensor."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    turned = matrix.clone() if left is None and right is None else matrix
    if left is not None:
        turned = (left if back else left.mT) @ turned
    if right is not None:
        turned = turned @ (right.mT if back else right)
    return turned


def shape_of_average(shape: tuple[int, ...], embedding: bool) -> tuple[int, ...]:
    """Return the shape of m and v: that of the parameter as a matrix."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape


def shape_of_side(
    number: int, max_side: int = MAX_SIDE
) -> Callable[[tuple[int, ...], bool], tuple[int, int] | None]:
    """Return the rule for the shape of L and Q_L (``number`` 0), or R and Q_R (1)."""

    def rule(shape: tuple[int, ...], embedding: bool) -> tuple[int, int] | None:
        side = shape_of_average(shape, embedding)[number] if len(shape) > 1 else max_side + 1
        return (side, side) if side <= max_side else None

    return rule


def memory_of_loop(shapes: Shapes, embeddings: Shapes) -> int:
    """Return the bytes of temporary memory of a step of fp32 parameters, one after the other. A step that
    computes the bases anew has more: three squares of the longer side."""
    return max(_of_parameter(shape) for shape in {**shapes, **embeddings})


def _of_parameter(shape: tuple[int, ...]) -> int:
    """Return the bytes of a parameter: g', the scale, and m' on its way; or the direction beside g gᵀ."""
    size = 4 * math.prod(shape)
    if len(shape) < 2:
        return size
    sides = [side for side in shape_of_average(shape, False) if side <= MAX_SIDE]
    return max(
        (3 + max(1, len(sides))) * size, 3 * size + max((4 * side * side for side in sides), default=0)
    )
