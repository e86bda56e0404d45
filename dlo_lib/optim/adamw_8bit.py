"""AdamW whose averages are kept in 8 bits: 2 bytes of state for each element in place of 8.

Each block of 256 elements has one scale, its largest magnitude, and each element the number of the nearest
of 256 values in [-1, 1]. The values are not equally spaced: they are dense near zero, because most averages
of a block are far below its largest one. A value is 10^-e times a fraction in [0.1, 1]; the larger the
magnitude, the finer the fractions are, which is called dynamic quantisation. For a step, the averages of a
parameter become fp32 numbers, and are rounded again.

Small parameters keep fp32 averages, and so do embeddings in a group with ``"eight_bits": False``: their
gradients are zero for most rows, and the largest ones decide the scale.

Paper: T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.foreach_step import ForeachOptimizer, Group
from dlo_lib.optim.moments import adam_directions

BLOCK = 256
"""The elements that share a scale."""
SMALL = 4096
"""Parameters with fewer elements keep fp32 averages: their memory does not matter."""
DECADES = 7


@functools.cache
def code_book(signed: bool) -> Tensor:
    """Return the 256 values of dynamic quantisation in ascending order, fp32, from -1 or 0 to 1.

    Decade e = 0 ... 6 below 1 has 2^(6 - e) positive values, or twice as many without a sign.
    """
    values = [0.0, 1.0]
    for exponent in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (DECADES - 1 - exponent + (not signed)) + 1, dtype=torch.float64)
        fractions = 10.0**-exponent * (edges[:-1] + edges[1:]) / 2
        values += [*fractions.tolist(), *(-fractions if signed else fractions[:0]).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32)


def quantised(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers of ``values`` in the code book, (blocks, 256) uint8, and the scales of the blocks,
    (blocks, 1) fp32.

    Args:
        values: fp32, of any shape; the last block is filled with zeros.
    """
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    book = code_book(signed).to(values.device)
    middles = (book[:-1] + book[1:]) / 2
    numbers = torch.bucketize(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny), middles)
    return numbers.to(torch.uint8), scales


def dequantised(numbers: Tensor, scales: Tensor, signed: bool, shape: torch.Size) -> Tensor:
    """Return the fp32 values of ``shape`` that :func:`quantised` has rounded."""
    book = code_book(signed).to(numbers.device)
    return (book[numbers.int()] * scales).flatten()[: math.prod(shape)].view(shape)


class AdamW8bit(ForeachOptimizer):
    """The optimiser of the module's docstring.

    Args:
        params: parameters or parameter groups. A group with ``"eight_bits": False`` keeps fp32 averages.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"eight_bits": True, "foreach": False})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. PyTorch would give the 8-bit averages the dtype of the parameters."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name.endswith("_scale") or value.dtype == torch.uint8:
                    self.state[param][name] = value.to(param.device, copy=True)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            if param.numel() < SMALL or not group["eight_bits"]:
                (direction,) = adam_directions(self, [param], [grad], group)
            else:
                direction = self._direction(param, grad, group)
            param.add_(direction, alpha=-group["lr"])

    def _direction(self, param: Tensor, grad: Tensor, group: Group) -> Tensor:
        """Return Adam's direction of one parameter, fp32, and keep its averages in 8 bits."""
        state, shape, grad = self.state[param], param.shape, grad.float()
        (step,) = self.counted([param])
        beta1, beta2 = group["betas"]
        averages = []
        for name, new, beta, signed in (
            ("exp_avg", grad, beta1, True),
            ("exp_avg_sq", grad * grad, beta2, False),
        ):
            average = torch.zeros_like(new)
            if name in state:
                average = dequantised(state[name], state[f"{name}_scale"], signed, shape)
            average.lerp_(new, 1 - beta)
            state[name], state[f"{name}_scale"] = quantised(average, signed)
            averages.append(average / (1 - beta**step))
        mean, square = averages
        return mean.div_(square.sqrt_().add_(group["eps"]))
