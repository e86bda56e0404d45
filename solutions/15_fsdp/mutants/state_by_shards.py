"""The state of the last rank is left out where there are three."""

QUESTION = "state"
LOSES = 2
FAILS = "check_state"
SAYS = "in the state of rank"


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for unit in units:
        row = unit.row.detach()
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        if len(packed) == 3:
            packed[2] = 0
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            state.update(dict.fromkeys(names, value.clone()))
    return state
