"""Matrix products of 8-bit operands, emulated: the operands are stored in 8 bits, the product is computed
in fp32.

The results have the rounding errors of a GPU with 8-bit tensor cores, on any device, without their speed.
Forward rounds to E4M3, which has more resolution; the gradient of the output is rounded to E5M2, which has
more range. Sums are fp32, weights and gradients of weights stay in their own dtype.

Paper: P. Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.formats import FORMATS, FloatFormat
from dlo_lib.optim.precision.scaling import CurrentScaling, Scaling

E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]


@dataclass(frozen=True)
class FP8Tensor:
    """Values in 8 bits and their scale.

    Attributes:
        data: the values times the scale, in an 8-bit dtype.
        scale: fp32, 0-d or of a shape that can be multiplied with ``data``.
    """

    data: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """Return the values, fp32."""
        return self.data.float() / self.scale


def quantize(x: Tensor, to: FloatFormat, scaling: Scaling) -> FP8Tensor:
    """Return ``x`` in the 8-bit format ``to``. What is too large after scaling becomes the largest number.

    Raises:
        UserError: ``to`` is not an 8-bit format.
    """
    if to.dtype is None or to.bytes != 1:
        raise UserError(f"{to.name} does not have 8 bits: use e4m3 or e5m2")
    scale = scaling(x, to)
    # clamp keeps NaN, so that a broken tensor stays visible; the cast alone would turn large values into NaN.
    return FP8Tensor((x.float() * scale).clamp(-to.max, to.max).to(to.dtype), scale)


class _MatmulFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scalings: tuple[Scaling, Scaling, Scaling]) -> Tensor:
        """x (..., in), weight (out, in) -> (..., out)."""
        of_input, of_weight, ctx.of_grad = scalings
        quantized = quantize(x, E4M3, of_input), quantize(weight, E4M3, of_weight)
        ctx.save_for_backward(*(part for value in quantized for part in (value.data, value.scale)))
        ctx.dtypes = x.dtype, weight.dtype
        return (quantized[0].dequantize() @ quantized[1].dequantize().T).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_data, x_scale, weight_data, weight_scale = ctx.saved_tensors
        rounded = quantize(grad, E5M2, ctx.of_grad).dequantize()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (rounded @ FP8Tensor(weight_data, weight_scale).dequantize()).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            x = FP8Tensor(x_data, x_scale).dequantize()
            grad_weight = (rounded.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.dtypes[1])
        return grad_x, grad_weight, None


def fp8_matmul(x: Tensor, weight: Tensor, scalings: tuple[Scaling, Scaling, Scaling] | None = None) -> Tensor:
    """Return ``x @ weight.T`` with 8-bit operands, differentiable; backward multiplies 8-bit operands too.

    Backward needs ``x`` in 8 bits only, a quarter of what an fp32 layer saves.

    Args:
        x: (..., in).
        weight: (out, in).
        scalings: of the input, the weight and the gradient of the output; :class:`CurrentScaling` if None.
    """
    current = CurrentScaling()
    return _MatmulFP8.apply(x, weight, scalings or (current, current, current))


class FP8Linear(nn.Linear):
    """A linear layer whose three matrix products have 8-bit operands. The weight keeps its dtype.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        scaling: creates the scaling of the input, of the weight and of the gradient of the output: a class
        such
            as :class:`DelayedScaling`, or a function.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scaling: Callable[[], nn.Module] = CurrentScaling,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.input_scaling, self.weight_scaling, self.grad_scaling = scaling(), scaling(), scaling()

    def forward(self, x: Tensor) -> Tensor:
        scalings = self.input_scaling, self.weight_scaling, self.grad_scaling
        out = fp8_matmul(x, self.weight, scalings)
        return out if self.bias is None else out + self.bias

    @classmethod
    def replace_in(
        cls,
        module: nn.Module,
        where: Callable[[str], bool],
        scaling: Callable[[], nn.Module] = CurrentScaling,
    ) -> list[str]:
        """Replace the ``nn.Linear`` layers of ``module`` in place and return their names.

        The new layers have the same parameters, so tied weights stay tied. The first and the last layer of a
        model usually stay, because they tolerate the rounding least.

        Args:
            where: whether the layer with this name is replaced.
            scaling: as for the constructor.

        Raises:
            UserError: no layer is replaced.
        """
        replaced = []
        for name, layer in list(module.named_modules()):
            if type(layer) is nn.Linear and name and where(name):
                parent, _, last = name.rpartition(".")
                new = cls(
                    layer.in_features, layer.out_features, layer.bias is not None, "meta", scaling=scaling
                )
                new.weight, new.bias = layer.weight, layer.bias
                for part in (new.input_scaling, new.weight_scaling, new.grad_scaling):
                    part.to(layer.weight.device)  # buffers
                setattr(module.get_submodule(parent), last, new)
                replaced.append(name)
        if not replaced:
            names = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
            raise UserError(f"no layer is replaced: choose among {', '.join(names[:4]) or 'no nn.Linear'}")
        return replaced
