"""The state is that of the gathered parameters."""

QUESTION = "state"
LOSES = 1
FAILS = "check_state_is_exact"
SAYS = "in the state of rank"


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for unit in units:
        row = unit.row.detach().to(unit.compute_dtype)
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            state.update(dict.fromkeys(names, value.to(unit.row.dtype, copy=True)))
    return state
