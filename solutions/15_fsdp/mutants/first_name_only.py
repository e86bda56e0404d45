"""A tied parameter has one of its names."""

QUESTION = "state"
LOSES = 1
FAILS = "check_tied_and_buffers"
SAYS = "lacks"


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for unit in units:
        row = unit.row.detach()
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            state.update({names[0]: value.clone()})
    return state
