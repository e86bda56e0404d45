"""The state of a sharded module in the format of the unsharded module. A tied parameter appears under each
name.

Cost: every unit is gathered once, and every rank stores the whole model on the CPU. For models larger than
the memory of a rank, use ``parallel.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.fsdp.param import FSDPParam
from dlo_lib.parallel.fsdp.param_group import FSDPParamGroup


def fsdp_params_by_name(module: nn.Module, units: Sequence[FSDPParamGroup]) -> dict[str, FSDPParam]:
    """Map the names of the parameters in ``module`` to the parameters; a tied one has several names. A module
    that was taken out of ``module`` has none."""
    names: dict[int, list[str]] = {}
    for name, inner in module.named_modules(remove_duplicate=False):
        names.setdefault(id(inner), []).append(name)
    params = [fsdp_param for unit in units for fsdp_param in unit.fsdp_params]
    owners = [(fsdp_param, *owner) for fsdp_param in params for owner in fsdp_param.owners]
    return {
        f"{name}.{attribute}".lstrip("."): fsdp_param
        for fsdp_param, inner, attribute in owners
        for name in names.get(id(inner), [])
    }


@torch.no_grad()
def full_state_dict(module: nn.Module, units: Sequence[FSDPParamGroup]) -> dict[str, Tensor]:
    """See ``FSDP.full_state_dict``. The values have the dtype of the parameters, not the compute dtype."""
    values: dict[FSDPParam, Tensor] = {}
    for unit in units:
        gathered = unit.gather_full_precision()
        for fsdp_param, value in zip(unit.fsdp_params, gathered):
            values[fsdp_param] = value.to("cpu", copy=True)
    by_name = fsdp_params_by_name(module, units)
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        state[name] = values[by_name[name]] if name in by_name else tensor.detach().to("cpu", copy=True)
    return state


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, units: Sequence[FSDPParamGroup], state: Mapping[str, Tensor]
) -> None:
    """See ``FSDP.load_full_state_dict``.

    Raises:
        UserError: the names or shapes are not those of the module.
    """
    wanted, by_name = module.state_dict(keep_vars=True), fsdp_params_by_name(module, units)
    if wrong := sorted(wanted.keys() ^ state.keys()):
        raise UserError(
            f"the state has other names than the module: {', '.join(wrong[:5])}: "
            "load the state of the same model",
        )
    for name, tensor in wanted.items():
        fsdp_param = by_name.get(name)
        shape = fsdp_param.whole.shape if fsdp_param is not None else tensor.shape
        if state[name].shape != shape:
            found = tuple(state[name].shape)
            raise UserError(f"{name} is {found} instead of {tuple(shape)}: load the state of the same model")
        if fsdp_param is None:
            tensor.copy_(state[name])
    names = {fsdp_param: name for name, fsdp_param in by_name.items()}
    for unit in units:
        for fsdp_param in unit.fsdp_params:
            if fsdp_param in names:
                unit.load(fsdp_param, state[names[fsdp_param]])
