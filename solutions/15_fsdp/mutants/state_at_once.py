"""All units are gathered in one message."""

QUESTION = "state"
LOSES = 1
FAILS = "check_unit_by_unit"
SAYS = "everything at once"


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    row = torch.cat([unit.row.detach() for unit in units])
    everything = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(everything.view(-1), row)
    for unit, packed in zip(units, everything.split([len(unit.row) for unit in units], dim=1)):
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            state.update(dict.fromkeys(names, value.clone()))
    return state
