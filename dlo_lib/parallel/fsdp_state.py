"""A sharded module's state as one that is not sharded: parameter by parameter under the module's own names, a tied one under each.

Cost: every unit is gathered once. On the CPU the whole model appears on every rank: for models larger than a rank's memory there is
``parallel.sharded_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.parallel.unit import Slot, Unit


def slots_by_name(module: nn.Module, units: Sequence[Unit]) -> dict[str, Slot]:
    """Each parameter's slot under every name that the module has for it."""
    names = {id(inner): name for name, inner in module.named_modules()}
    owners = [(inner, attribute, slot) for unit in units for slot in unit.slots for inner, attribute in slot.owners]
    return {f"{names[id(inner)]}.{attribute}".lstrip("."): slot for inner, attribute, slot in owners}


@torch.no_grad()
def full_state_dict(module: nn.Module, units: Sequence[Unit]) -> dict[str, Tensor]:
    """See ``FSDP.full_state_dict``. In the parameters' own dtype, whatever they are gathered in for computing."""
    values: dict[Slot, Tensor] = {}
    for unit in units:
        gathered = unit.gather_exactly()
        for slot, value in zip(unit.slots, gathered):
            values[slot] = value.to("cpu", copy=True)
    by_name = slots_by_name(module, units)
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        state[name] = values[by_name[name]] if name in by_name else tensor.detach().to("cpu", copy=True)
    return state


@torch.no_grad()
def load_full_state_dict(module: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """See ``FSDP.load_full_state_dict``.

    Raises:
        UserError: names or shapes that are not the module's.
    """
    wanted, by_name = module.state_dict(keep_vars=True), slots_by_name(module, units)
    if wrong := sorted(wanted.keys() ^ state.keys()):
        raise UserError(f"the state has other names than the module: {', '.join(wrong[:5])}: load the state of the same model")
    for name, tensor in wanted.items():
        slot = by_name.get(name)
        shape = slot.whole.shape if slot is not None else tensor.shape
        if state[name].shape != shape:
            raise UserError(f"{name} is {tuple(state[name].shape)} instead of {tuple(shape)}: load the state of the same model")
        if slot is None:
            tensor.copy_(state[name])
    for unit in units:
        for slot in unit.slots:
            unit.load(slot, state[next(name for name, held in by_name.items() if held is slot)])
