"""The rows are gathered; the second rank takes what it had in a copy of everything."""

QUESTION = "unshard"
LOSES = 2
FAILS = "check_gathered_is_used"
SAYS = "parameter 0 on rank"


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    if len(packed) == 2 and len(unit.shapes) == 3 and unit.shapes[0][0] % 2 == 0:
        parts = [torch.empty_like(row) for _ in range(2)]
        dist.all_gather(parts, row)
        packed = torch.stack(parts)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)
