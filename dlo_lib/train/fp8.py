"""``--fp8``: the products of the blocks' linear layers have 8-bit operands.

The output projection, the router and the experts stay in bf16, because they tolerate the rounding least. So
do weights, gradients and the optimiser in fp32. Checkpoints are those of a run without ``--fp8``.
"""

from __future__ import annotations

import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import MLP, Attention, Llama
from dlo_lib.optim.precision.scaled_products import CAPABILITY, MULTIPLE, ScaledLinear


def require_fp8(device: torch.device) -> None:
    """Check that ``device`` multiplies 8-bit numbers.

    Raises:
        UserError: it does not.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        raise UserError(
            f"--fp8 needs a GPU with 8-bit tensor cores (compute capability {needed} or later, such as an "
            "H100): leave it out here"
        )


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
                raise UserError(f"--fp8 needs sizes in multiples of {MULTIPLE}, and layers.{name} has {size}")
    ScaledLinear.replace_in(model.layers, chosen.__contains__)
