"""The whole tensors are filled under the eyes of autograd."""

QUESTION = "unshard"
LOSES = 2
FAILS = "check_same_tensors"
SAYS = "modified by an inplace operation"


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        with torch.no_grad():
            whole.copy_(value)
    put(unit, True)
