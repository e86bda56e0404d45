"""Puts 8-bit products into the blocks of a Llama, as ``train --fp8`` does.

The output projection, the router and the experts stay in bf16, because they tolerate the rounding least. So
do weights, gradients and the optimiser in fp32.
"""

from __future__ import annotations

from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import MLP, Attention, Llama
from dlo_lib.optim.precision.scaled_products import MULTIPLE, ScaledLinear


def use_fp8(model: Llama) -> None:
    """Replace the linear layers of attention and MLPs in the blocks of ``model``, in place.

    Args:
        model: a model that is not distributed yet, on any device, also on the meta device.

    Raises:
        UserError: a size of a layer is not a multiple of 16.
    """
    owners = [name for name, module in model.layers.named_modules() if isinstance(module, (Attention, MLP))]
    chosen = {
        f"{owner}.{name}"
        for owner in owners
        for name, layer in model.layers.get_submodule(owner).named_children()
        if type(layer) is nn.Linear
    }
    for name in sorted(chosen):
        for size in model.layers.get_parameter(f"{name}.weight").shape:
            if size % MULTIPLE:
                raise UserError(f"fp8 needs sizes in multiples of {MULTIPLE}, and layers.{name} has {size}")
    ScaledLinear.replace_in(model.layers, chosen.__contains__)
