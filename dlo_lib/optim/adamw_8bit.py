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

from dlo_lib.optim.entry import Shapes
from dlo_lib.optim.foreach_step import ForeachOptimizer, Group
from dlo_lib.optim.moments import adam_directions

BLOCK = 256
"""The elements that share a scale."""
SMALL = 4096
"""Parameters with fewer elements keep fp32 averages: their memory does not matter."""
DECADES = 7


@functools.cache
def _values(signed: bool) -> tuple[float, ...]:
    """Return the code book as numbers: a tensor that is kept may be a fake one, of a simulation."""
    values = [0.0, 1.0]
    for exponent in range(DECADES):
        parts = 2 ** (DECADES - 1 - exponent + (not signed))
        fractions = [10.0**-exponent * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        values += fractions + ([-fraction for fraction in fractions] if signed else [])
    return tuple(sorted(values))


def code_book(signed: bool, device: torch.device | None = None) -> Tensor:
    """Return the 256 values of dynamic quantisation in ascending order, fp32, from -1 or 0 to 1.

    Decade e = 0 ... 6 below 1 has 2^(6 - e) positive values, or twice as many without a sign.
    """
    return torch.tensor(_values(signed), dtype=torch.float32, device=device)


def quantised(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers of ``values`` in the code book, (blocks, 256) uint8, and the scales of the blocks,
    (blocks, 1) fp32.

    Args:
        values: fp32, of any shape; the last block is filled with zeros.
    """
    flat, lacking = values.flatten(), -values.numel() % BLOCK
    blocks = (torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    book = code_book(signed, values.device)
    middles = (book[:-1] + book[1:]) / 2
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.bucketize(shares, middles, out_int32=True).to(torch.uint8), scales


def dequantised(numbers: Tensor, scales: Tensor, signed: bool, shape: torch.Size) -> Tensor:
    """Return the fp32 values of ``shape`` that :func:`quantised` has rounded."""
    book = code_book(signed, numbers.device)
    return book[numbers.int()].mul_(scales).flatten()[: math.prod(shape)].view(shape)


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
        grad = grad.float()
        (step,) = self.counted([param])
        beta1, beta2 = group["betas"]
        mean = self._average(param, "exp_avg", signed=True).lerp_(grad, 1 - beta1)
        self._keep(param, "exp_avg", mean, signed=True)
        square = self._average(param, "exp_avg_sq", signed=False)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        self._keep(param, "exp_avg_sq", square, signed=False)
        scale = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        return mean.div_(1 - beta1**step).div_(scale)

    def _average(self, param: Tensor, name: str, signed: bool) -> Tensor:
        """Return an average of ``param`` in fp32, a new tensor of its shape."""
        state = self.state[param]
        if name not in state:
            return torch.zeros_like(param, dtype=torch.float32)
        return dequantised(state[name], state[f"{name}_scale"], signed, param.shape)

    def _keep(self, param: Tensor, name: str, average: Tensor, signed: bool) -> None:
        state = self.state[param]
        for key, value in zip((name, f"{name}_scale"), quantised(average, signed), strict=True):
            if key in state:
                state[key].copy_(value)
            else:
                state[key] = value


def shape_of_numbers(shape: tuple[int, ...], embedding: bool) -> tuple[int, int] | None:
    """Return the shape of an average in 8 bits; None for a parameter that keeps fp32 averages."""
    size = math.prod(shape)
    return None if embedding or size < SMALL else (-(-size // BLOCK), BLOCK)


def shape_of_scales(shape: tuple[int, ...], embedding: bool) -> tuple[int, int] | None:
    """Return the shape of the scales of an average in 8 bits."""
    numbers = shape_of_numbers(shape, embedding)
    return None if numbers is None else (numbers[0], 1)


def shape_of_wide_average(shape: tuple[int, ...], embedding: bool) -> tuple[int, ...] | None:
    """Return the shape of an fp32 average; None for a parameter whose averages have 8 bits."""
    return shape if shape_of_numbers(shape, embedding) is None else None


def memory_of_loop(shapes: Shapes, embeddings: Shapes) -> int:
    """Return the bytes of temporary memory of a step of fp32 parameters, one after the other."""
    quantised = max(map(_of_parameter, shapes))
    return max([quantised, *(4 * math.prod(shape) for shape in embeddings)])


def _of_parameter(shape: tuple[int, ...]) -> int:
    """Return the bytes of a parameter: both averages and one of them divided by its scales, in fp32, its
    numbers as int32 and as bytes, and the scales."""
    size = math.prod(shape)
    if size < SMALL:
        return 4 * size
    blocks = -(-size // BLOCK)
    return 8 * size + (9 + (4 if size % BLOCK else 0)) * blocks * BLOCK + 4 * blocks
