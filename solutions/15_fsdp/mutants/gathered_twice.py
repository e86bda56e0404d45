"""A unit that is whole is gathered again."""

QUESTION = "unshard"
LOSES = 2
FAILS = "check_one_gather"
SAYS = "gathered twice"


def unshard(unit: Unit) -> None:
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)
