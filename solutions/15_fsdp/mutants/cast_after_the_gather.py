"""The rows travel in fp32 and are rounded when they have come."""

QUESTION = "unshard"
LOSES = 1
FAILS = "check_compute_dtype"
SAYS = "cast the row before it is sent"


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach()
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)
