"""The rows of the last rank are its own, with three ranks or more."""

QUESTION = "unshard"
LOSES = 3
FAILS = "check_whole_values"
SAYS = "on rank"


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    if len(packed) > 2:
        packed[-1] = row
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)
